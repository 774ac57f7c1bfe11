"""polyamp for PyTorch: `GradScaler` and `autocast` by the spec, under the names and habits of `torch.amp`.

Public names are imported on first use, so that the plug-in module can be asked for its environment before torch loads.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyamp_torch.autocasting import autocast
    from polyamp_torch.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]

_HOMES = {"GradScaler": "polyamp_torch.grad_scaler", "autocast": "polyamp_torch.autocasting"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
