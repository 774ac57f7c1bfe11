"""Devices by the names that all backends share (`"cpu"`, `"cuda"`, `"tpu"`); Keras calls a GPU `"gpu"`."""

from __future__ import annotations

from typing import Any

import keras

from polyamp import UnsupportedError
from polyamp_keras.native import BACKEND

__all__ = ["device_scope", "visible_devices"]

_SHARED = {"gpu": "cuda"}


def visible_devices() -> dict[str, str]:
    """Shared name -> Keras' name of the first device of that kind, e.g. `{"cpu": "cpu:0", "cuda": "gpu:0"}`."""
    # On torch a device is named as Keras names its default, without an index: under "cpu:0" it copies every variable, and gradients are lost.
    found = {"cpu": "cpu" if BACKEND == "torch" else "cpu:0"}
    for name in _listed():
        kind = name.partition(":")[0]
        found.setdefault(_SHARED.get(kind, kind), name)
    return found


def _listed() -> list[str]:
    if BACKEND == "torch":  # keras.distribution lists no torch devices
        import torch

        return ["gpu"] if torch.cuda.is_available() else []
    return [str(name).lower() for name in keras.distribution.list_devices()]


def device_scope(device: str) -> Any:
    """Context in which Keras creates variables and runs operations on this device.

    Raises:
        UnsupportedError: there is none here.
    """
    found = visible_devices()
    if device not in found:
        raise UnsupportedError(f"device {device!r} is not visible to Keras; visible: {', '.join(found)}")
    return keras.device(found[device])
