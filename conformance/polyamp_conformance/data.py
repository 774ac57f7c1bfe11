"""Data: scikit-learn's handwritten digits, and the random streams of a seed.

Rules (docs/spec.md, section 9.3)
- Every number comes from numpy's Philox generator, keyed by (seed, stream): the same on every platform, whatever else was drawn.
- The split into training and held-out rows is fixed by its own key: accuracies of different seeds are of the same rows.
- Pixels are divided by 16, into [0, 1]; that is exact.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["HELD_OUT", "batch_order", "digits", "stream"]

Array = NDArray[Any]
HELD_OUT = 497
_SPLIT_KEY = (1797, 0)


def stream(seed: int, number: int) -> np.random.Generator:
    """Random generator of one stream of a seed; streams are independent."""
    return np.random.Generator(np.random.Philox(key=[seed, number]))


@cache
def digits() -> tuple[Array, Array, Array, Array]:
    """The bundled digits data: 1,797 real images of 8 x 8 pixels.

    Returns:
        Training pixels float32 (1300, 64), training classes int32 (1300,), and the same for the 497 held-out rows.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels, classes = (bunch.data / 16).astype(np.float32), bunch.target.astype(np.int32)
    order = stream(*_SPLIT_KEY).permutation(len(classes))
    held, kept = order[:HELD_OUT], order[HELD_OUT:]
    return pixels[kept], classes[kept], pixels[held], classes[held]


def batch_order(rng: np.random.Generator, rows: int, steps: int, batch_size: int) -> Array:
    """Row numbers of every batch, (steps, batch_size): whole shuffled passes over the rows, one after another."""
    passes = -(-steps * batch_size // rows)
    order = np.concatenate([rng.permutation(rows) for _ in range(passes)])
    return order[: steps * batch_size].reshape(steps, batch_size)
