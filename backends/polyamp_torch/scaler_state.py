"""The part of GradScaler between steps: configuration, state, settings, saving and loading.

Rules (docs/spec.md, sections 3 and 7)
- `LossScale` is the one configuration; torch's setters replace it and validate as its constructor does.
- State is created eagerly on the scaler's device.
- Loading, setting and copying validate first; what is refused changes nothing.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from polyamp import LossScale, LossScaleError, MisuseError
from polyamp_torch import loss_scale_state
from polyamp_torch.loss_scale_state import ScaleState
from polyamp_torch.scale_watch import ScaleWatch
from polyamp_torch.step_records import PendingRecord, TraceBuffer
from polyamp_torch.step_window import StepWindow

__all__ = ["ScalerState"]


class ScalerState(torch.amp.GradScaler):
    """Base of `polyamp_torch.GradScaler`: everything but the step. See there."""

    def __init__(self, config: LossScale, device: str | torch.device | None, enabled: bool) -> None:
        # torch's own constructor would create settings of its own beside the configuration.
        target = default_device() if device is None else torch.device(device)
        if enabled and target.type == "cuda" and not torch.cuda.is_available() and find_spec("torch_xla") is None:
            warnings.warn("GradScaler is enabled for CUDA, but CUDA is not available; disabling it", UserWarning, stacklevel=3)
            enabled = False
        self._enabled = enabled
        self._scale_device = target
        self._config = config
        self._buffer: TraceBuffer | None = None
        if enabled:
            self._start(config, loss_scale_state.place(config.init(), target))

    @property
    def loss_scale(self) -> LossScale:
        """Configuration in force."""
        return self._config

    def get_scale(self) -> float:
        """Scale in force, 1.0 when disabled; waits for the device."""
        return float(self._state.scale.item()) if self._enabled else 1.0

    def get_growth_factor(self) -> float:
        return self._config.growth_factor

    def get_backoff_factor(self) -> float:
        return self._config.backoff_factor

    def get_growth_interval(self) -> int:
        return self._config.growth_interval

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets the growth factor; raises `polyamp.LossScaleError` unless it is > 1."""
        self._reconfigure(growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets the backoff factor; raises `polyamp.LossScaleError` unless it is in (0, 1)."""
        self._reconfigure(backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets the growth interval; one below the counter grows the scale at the next finite step."""
        self._reconfigure(growth_interval=new_interval)

    def state_dict(self) -> dict[str, Any]:
        """Portable mapping (docs/spec.md, section 7) with torch's five keys in it, so that `torch.amp.GradScaler` loads it too.

        Empty when disabled. Call it after `update`; waits for the device.
        """
        if not self._enabled:
            return {}
        mapping = loss_scale_state.to_mapping(self._config, self._state)
        return {**mapping, "_growth_tracker": mapping["good_steps"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a mapping of any polyamp backend, or from that of torch, Megatron or DeepSpeed.

        An empty mapping, which a disabled scaler writes, starts from the configured defaults with a warning.

        Raises:
            polyamp.StateError: the mapping can't be loaded; nothing has changed.
        """
        if self._enabled:
            self._start(*loss_scale_state.load_mapping(state_dict, self._config, self._scale_device))

    def __getstate__(self) -> dict[str, Any]:
        """State for pickle and copy: configuration and counters. The trace and the last record stay behind."""
        if self._enabled and (self._window.scaled or self._window.optimizers):
            raise MisuseError("a GradScaler can be pickled or copied between two steps only: after update(), before scale()")
        return {"device": str(self._scale_device), "enabled": self._enabled, "loss_scale": self._config, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._enabled = state["enabled"]
        self._scale_device = torch.device(state["device"])
        self._config = state["loss_scale"]
        self._buffer = None
        if self._enabled:
            self.load_state_dict(state["state"])

    # Names that code written for torch's scaler reads.

    @property
    def _device(self) -> str:  # type: ignore[override]
        return self._scale_device.type

    @property
    def _scale(self) -> Tensor | None:  # type: ignore[override]
        return self._state.scale if self._enabled else None

    @property
    def _growth_tracker(self) -> Tensor | None:  # type: ignore[override]
        return self._state.good_steps if self._enabled else None

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Nothing is left to create: state exists from the start, on the scaler's own device."""

    def _start(self, config: LossScale, state: ScaleState) -> None:
        """Puts a configuration and a state in force and forgets the step that was under way."""
        self._config = config
        self._state = state
        self._rules = loss_scale_state.rules(config, self._scale_device)
        self._reads_are_free = self._scale_device.type == "cpu"
        self._one = torch.ones((), dtype=torch.float32, device=self._scale_device)
        self._last: PendingRecord | None = None
        self._clear()
        self._watch = ScaleWatch(config, float(state.scale.item()), self._scale_device)

    def _clear(self) -> None:
        self._window = StepWindow()
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def _reconfigure(self, **changes: Any) -> None:
        self._config = replace(self._config, **changes)
        if self._enabled:
            self._rules = loss_scale_state.rules(self._config, self._scale_device)
            self._watch = ScaleWatch(self._config, float(self._state.scale.item()), self._scale_device)

    def _set_scale(self, new_scale: float | Tensor) -> None:
        if isinstance(new_scale, Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise LossScaleError(
                    f"new_scale of shape {tuple(new_scale.shape)}, requires_grad={new_scale.requires_grad}: expected one number without gradient"
                )
            new_scale = float(new_scale.item())
        value = self._config.check_scale(new_scale)
        self._state = self._state._replace(scale=torch.full_like(self._state.scale, value))
        self._clear()
        self._watch = ScaleWatch(self._config, value, self._scale_device)


def default_device() -> torch.device:
    """The accelerator of this machine, or the CPU where it has none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator or torch.device("cpu")
