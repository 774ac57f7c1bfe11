"""Devices by the names that all backends share: `"cpu"`, `"cuda"`, `"rocm"`, `"tpu"`. JAX calls both kinds of GPU `"gpu"`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import jax

from polyamp.errors import UnsupportedError

if TYPE_CHECKING:
    from jax import Device

__all__ = ["find_device", "visible_devices"]


def visible_devices() -> dict[str, Device]:
    """First device of each kind that this process may use."""
    devices = list(jax.devices())
    if not any(device.platform == "cpu" for device in devices):
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave the CPU out
            devices += jax.devices("cpu")
    found: dict[str, Device] = {}
    for device in devices:
        found.setdefault(_name(device), device)
    return dict(sorted(found.items()))


def find_device(name: str) -> Device:
    """The device of this name.

    Raises:
        UnsupportedError: there is none here.
    """
    found = visible_devices()
    if name not in found:
        raise UnsupportedError(f"device {name!r} is not visible to JAX; visible: {', '.join(found)}. Check the jaxlib plug-ins and JAX_PLATFORMS")
    return found[name]


def _name(device: Device) -> str:
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
