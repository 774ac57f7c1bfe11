"""Digests of named arrays: equal exactly when every float32 bit is equal.

Zeros count without their sign, and so does everything below 2^-100: a momentum that only decays ends in float32 subnormals, which XLA
flushes, and Keras, which stores it times the learning rate, meets them some steps earlier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from polyamp.backend import Snapshot
from polyamp_conformance.data import Array

__all__ = ["digest", "moved", "slots_digest"]

_NOTHING = np.float32(2.0**-100)


def digest(arrays: Mapping[str, Array], names: Iterable[str]) -> str:
    """Hash of the arrays in the order of `names`: little-endian float32, C order."""
    hasher = hashlib.blake2b(digest_size=16)
    for name in names:
        hasher.update(name.encode())
        values = np.ascontiguousarray(arrays[name], "<f4")
        hasher.update(np.where(np.abs(values) < _NOTHING, np.float32(0), values).tobytes())
    return hasher.hexdigest()


def slots_digest(slots: Mapping[str, Mapping[str, Array]], names: Iterable[str]) -> float:
    """Hash of all optimizer slots as a whole number below 2^48, which JSON and float64 hold exactly."""
    order = list(names)
    text = "".join(digest(slots[slot], order) for slot in sorted(slots))
    return float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))


def moved(before: Snapshot, after: Snapshot) -> float:
    """Number of elements of weights and optimizer slots that differ; NaN counts as different from everything."""
    pairs = [(before.parameters, after.parameters), *((before.slots[slot], after.slots[slot]) for slot in before.slots)]
    return float(sum(int(np.sum(np.asarray(old[name]) != np.asarray(new[name]))) for old, new in pairs for name in old))
