"""Plug-in of the three Keras backends. Rule: importing this module, and asking for the environment, imports no framework.

Keras is one backend a process: it is chosen by `KERAS_BACKEND` before its first import and stays. Asking for another one is an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from polyamp.errors import BackendError
from polyamp.hookspecs import hookimpl
from polyamp.xla_flags import xla_environment

if TYPE_CHECKING:
    from polyamp.backend import Backend

__all__ = ["polyamp_get_backend", "polyamp_get_environment"]

_NAMES = {"keras-tensorflow": "tensorflow", "keras-jax": "jax", "keras-torch": "torch"}

# One thread a process: sums are then split in the same way on every machine, and five backends don't fight for two cores.
_THREADS = {
    "tensorflow": {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"},
    "jax": {},
    "torch": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
}


@hookimpl
def polyamp_get_backend(name: str) -> Backend | None:
    """Imports Keras on the backend that `name` says.

    Raises:
        BackendError: this process has Keras on another backend already.
    """
    wanted = _NAMES.get(name)
    if wanted is None:
        return None
    loaded = sys.modules.get("keras")
    if loaded is None:
        os.environ["KERAS_BACKEND"] = wanted
    import keras

    actual = keras.backend.backend()
    if actual != wanted:
        how = "was imported before" if loaded is not None else "came up"
        raise BackendError(
            f"backend {name!r} needs Keras on {wanted}, but in this process Keras {how} on {actual}, and it can't change; "
            f"start another process with KERAS_BACKEND={wanted}"
        )
    from polyamp_keras.runner import KerasBackend

    return KerasBackend()


@hookimpl
def polyamp_get_environment(name: str) -> Mapping[str, str] | None:
    """Keras' backend, quiet TensorFlow logs, thread counts that the user has not set, and for JAX the XLA flags for honest rounding."""
    wanted = _NAMES.get(name)
    if wanted is None:
        return None
    optional = {"TF_CPP_MIN_LOG_LEVEL": "3", **_THREADS[wanted]}
    environment = {"KERAS_BACKEND": wanted, **{key: value for key, value in optional.items() if key not in os.environ}}
    return {**environment, **(xla_environment(os.environ) if wanted == "jax" else {})}
