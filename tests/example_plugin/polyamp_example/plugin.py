"""What the entry point names: the hooks, and nothing that takes time to import."""

from __future__ import annotations

from polyamp.backend import Backend
from polyamp.hookspecs import hookimpl


@hookimpl
def polyamp_get_backend(name: str) -> Backend | None:
    """The backend, for its own name only."""
    if name != "example":
        return None
    from polyamp_example.backend import ExampleBackend

    return ExampleBackend()
