"""Plug-in of the PyTorch backend. Rule: importing this module, and asking for the environment, imports no framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from polyamp.hookspecs import hookimpl

if TYPE_CHECKING:
    from polyamp.backend import Backend

__all__ = ["polyamp_get_backend", "polyamp_get_environment"]


@hookimpl
def polyamp_get_backend(name: str) -> Backend | None:
    """Builds the backend named `"torch"`."""
    if name != "torch":
        return None
    from polyamp_torch.runner import TorchBackend

    return TorchBackend()


@hookimpl
def polyamp_get_environment(name: str) -> Mapping[str, str] | None:
    """Nothing: what torch.compile needs is set for each compiled function, and no default of eager torch falsifies a rounding."""
    return None
