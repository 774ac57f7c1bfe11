"""Versions of the packages that decide what a Keras run computes."""

from __future__ import annotations

from importlib import import_module

from polyamp_keras.native import BACKEND

__all__ = ["backend_name", "versions"]


def backend_name() -> str:
    """Name under which this process' Keras backend is registered, e.g. `"keras-jax"`."""
    return f"keras-{BACKEND}"


def versions() -> dict[str, str]:
    """Version of Keras and of the framework under it, by package name."""
    packages = ("keras", BACKEND, "jaxlib") if BACKEND == "jax" else ("keras", BACKEND)
    # By module: TensorFlow's distribution has several names.
    return {package: str(import_module(package).__version__) for package in packages}
