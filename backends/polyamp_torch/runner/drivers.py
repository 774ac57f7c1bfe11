"""Scale drivers of the conformance suite.

Rules (docs/spec.md, section 3)
- "eager" is a whole `GradScaler` step with an optimizer of one parameter, whose gradient is finite or not.
- "compiled" is the pure transition as one compiled graph, with the configuration as an argument: it is compiled once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from polyamp import LossScale
from polyamp_torch import loss_scale_state
from polyamp_torch.grad_scaler import GradScaler
from polyamp_torch.loss_scale_state import ScaleRules, ScaleState
from polyamp_torch.runner.compiler import compile_whole

__all__ = ["CompiledDriver", "ScalerDriver"]


class ScalerDriver:
    """Implements `polyamp.backend.ScaleDriver` with a `GradScaler`."""

    def __init__(self, config: LossScale, device: str) -> None:
        self._parameter = nn.Parameter(torch.ones((), device=device))
        self._optimizer = torch.optim.SGD([self._parameter], lr=0.0)
        self._scaler = GradScaler(device, loss_scale=config)

    def update(self, finite: bool) -> None:
        self._optimizer.zero_grad()
        self._scaler.scale(self._parameter * (1.0 if finite else torch.inf)).backward()  # type: ignore[no-untyped-call]
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def state_dict(self) -> Mapping[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, mapping: Mapping[str, Any]) -> None:
        self._scaler.load_state_dict(mapping)


@cache
def _compiled_update(device: str) -> Callable[[ScaleState, ScaleRules, Tensor], ScaleState]:
    return compile_whole(loss_scale_state.update, device)


class CompiledDriver:
    """Implements `polyamp.backend.ScaleDriver` with the compiled transition."""

    def __init__(self, config: LossScale, device: str) -> None:
        self._device = device
        self._config = config
        self._state = loss_scale_state.place(config.init(), device)
        self._rules = loss_scale_state.rules(config, device)
        self._update = _compiled_update(device)

    def update(self, finite: bool) -> None:
        found_inf = torch.tensor(0.0 if finite or not self._config.check else 1.0, device=self._device)
        self._state = self._update(self._state, self._rules, found_inf)
        state = loss_scale_state.read(self._state)
        if self._config.is_stalled(state):
            raise self._config.stalled_error(state.consecutive_skips, state.scale)

    def state_dict(self) -> Mapping[str, Any]:
        return loss_scale_state.to_mapping(self._config, self._state)

    def load_state_dict(self, mapping: Mapping[str, Any]) -> None:
        self._config, self._state = loss_scale_state.load_mapping(mapping, self._config, self._device)
        self._rules = loss_scale_state.rules(self._config, self._device)
