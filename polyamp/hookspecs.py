"""Pluggy hooks of a backend plug-in. A plug-in is a module that is named by an entry point of group `polyamp`; the entry's name is the backend's.

Rules
- The module itself imports no framework: `polyamp_get_environment` is called before the framework may load.
- `polyamp_get_backend(name)` imports the framework and answers for its own names only, with None for others.
"""

from __future__ import annotations

from collections.abc import Mapping

import pluggy

from polyamp.backend import Backend

__all__ = ["PROJECT", "hookimpl", "hookspec"]

PROJECT = "polyamp"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def polyamp_get_backend(name: str) -> Backend | None:
    """Builds the backend of this name, or returns None for a name of another plug-in."""


@hookspec(firstresult=True)
def polyamp_get_environment(name: str) -> Mapping[str, str] | None:
    """Environment variables under which the backend's numerics are honest, to be set before its process starts.

    They are gated by installed version: an unknown XLA flag aborts the process. None or an empty mapping asks for nothing.
    """
