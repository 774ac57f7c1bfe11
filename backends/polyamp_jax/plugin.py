"""Plug-in of the JAX backend. Rule: importing this module, and asking for the environment, imports no framework."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from polyamp.hookspecs import hookimpl
from polyamp.xla_flags import xla_environment

if TYPE_CHECKING:
    from polyamp.backend import Backend

__all__ = ["polyamp_get_backend", "polyamp_get_environment"]


@hookimpl
def polyamp_get_backend(name: str) -> Backend | None:
    """Builds the backend named `"jax"`."""
    if name != "jax":
        return None
    from polyamp_jax.runner import JaxBackend

    return JaxBackend()


@hookimpl
def polyamp_get_environment(name: str) -> Mapping[str, str] | None:
    """XLA flags for honest rounding, added to those that are set already. `JAX_PLATFORMS` is the user's."""
    return xla_environment(os.environ) if name == "jax" else None
