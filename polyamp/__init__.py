"""polyamp: mixed-precision training with one written spec and the same behaviour on PyTorch, JAX and Keras 3.

This package is the spec as code: dtype policy, loss scale, trace, and the registry of backends. It imports no framework.
The native implementations are `polyamp_torch`, `polyamp_jax` and `polyamp_keras`.

Public names are imported on first use (PEP 562), so that `import polyamp` costs next to nothing in a training script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyamp.lazy import attach

if TYPE_CHECKING:
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

__getattr__, __dir__ = attach(
    __name__,
    {
        "polyamp.errors": (
            "BackendError",
            "DuplicateBackendError",
            "LossScaleError",
            "LossScaleStalled",
            "MissingFrameworkError",
            "MisuseError",
            "PolicyError",
            "PolyampError",
            "StateError",
            "TraceError",
            "UnknownBackendError",
            "UnsupportedError",
        ),
        "polyamp.formats": (
            "FORMATS",
            "Format",
        ),
        "polyamp.loss_scale": (
            "LossScale",
            "LossScaleState",
        ),
        "polyamp.op_rules": (
            "OP_RULES",
            "OpClass",
        ),
        "polyamp.policy": ("Policy",),
        "polyamp.registry": (
            "available_backends",
            "get_backend",
            "registered_backends",
        ),
        "polyamp.trace": (
            "StepRecord",
            "Trace",
        ),
    },
)
