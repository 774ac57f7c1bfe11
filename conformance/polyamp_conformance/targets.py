"""Targets: what a backend name on the command line stands for.

Rules
- `oracle` is the numpy reference. A plain name is a registered backend. `module:attribute` is a class or factory that is not registered
  (yet): the way to try a backend before it has an entry point, and to run a deliberately wrong one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from importlib import import_module

from polyamp.backend import Backend
from polyamp.errors import BackendError, MissingFrameworkError, UnknownBackendError
from polyamp.registry import get_backend, get_environment, registered_backends

__all__ = ["ORACLE", "check_target", "folder_name", "load_target", "target_environment"]

ORACLE = "oracle"
_PINNED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def check_target(name: str) -> None:
    """Fails early, without importing a framework, on a name that can't be run.

    Raises:
        UnknownBackendError: nobody registers it.
        MissingFrameworkError: its framework is not installed.
    """
    if name == ORACLE or ":" in name:
        return
    known = registered_backends()
    if name not in known:
        raise UnknownBackendError(f"no backend {name!r}; registered: {', '.join(known) or 'none'}, or give module:attribute")
    if known[name].missing:
        raise MissingFrameworkError(f"backend {name!r} needs {', '.join(known[name].missing)}; run: {known[name].install}")


def load_target(name: str) -> Backend:
    """Builds the target, importing its framework."""
    if name == ORACLE:
        from polyamp_conformance.oracle.backend import OracleBackend

        return OracleBackend()
    if ":" not in name:
        return get_backend(name)
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it: a backend under development lies in the working directory
    try:
        factory = getattr(import_module(module), attribute)
    except AttributeError as error:
        raise UnknownBackendError(f"{module} has no {attribute!r}; expected module:attribute of a backend class or factory") from error
    backend = factory()
    if not isinstance(backend, Backend):
        raise BackendError(f"{name} made a {type(backend).__name__}, which lacks methods of polyamp.backend.Backend")
    return backend


def target_environment(name: str) -> Mapping[str, str]:
    """Environment of the target's process: one thread per library, and what its plug-in asks for."""
    asked = {} if name == ORACLE or ":" in name else get_environment(name)
    return {**dict.fromkeys(_PINNED, "1"), "PYTHONHASHSEED": "0", **asked}


def folder_name(name: str) -> str:
    """The target's name as a file name."""
    return re.sub(r"[^\w.-]+", "_", name)
