"""polyamp: mixed-precision training with one written spec and the same behaviour on PyTorch, JAX and Keras 3.

This package is the spec as code: dtype policy, loss scale, trace, and the registry of backends. It imports no framework.
The native implementations are `polyamp_torch`, `polyamp_jax` and `polyamp_keras`.
"""

from __future__ import annotations

from polyamp.errors import (
    BackendError,
    DuplicateBackendError,
    LossScaleError,
    LossScaleStalled,
    MissingFrameworkError,
    MisuseError,
    PolicyError,
    PolyampError,
    StateError,
    TraceError,
    UnknownBackendError,
    UnsupportedError,
)
from polyamp.formats import FORMATS, Format
from polyamp.loss_scale import LossScale, LossScaleState
from polyamp.op_rules import OP_RULES, OpClass
from polyamp.policy import Policy
from polyamp.registry import available_backends, get_backend, registered_backends
from polyamp.trace import StepRecord, Trace

__version__ = "0.1.0"

__all__ = [
    "FORMATS",
    "OP_RULES",
    "BackendError",
    "DuplicateBackendError",
    "Format",
    "LossScale",
    "LossScaleError",
    "LossScaleStalled",
    "LossScaleState",
    "MissingFrameworkError",
    "MisuseError",
    "OpClass",
    "Policy",
    "PolicyError",
    "PolyampError",
    "StateError",
    "StepRecord",
    "Trace",
    "TraceError",
    "UnknownBackendError",
    "UnsupportedError",
    "available_backends",
    "get_backend",
    "registered_backends",
]
