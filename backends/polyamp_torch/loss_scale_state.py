"""Loss-scale state as 0-d tensors, and the transition as a pure function of tensors.

Rules (docs/spec.md, section 3.2)
- The arithmetic is that of `polyamp.LossScale.update`, bit for bit: float32 products are rounded once, counters are int32.
- No host value decides anything and nothing is read back, so a step never waits for the device, and the transition traces into one graph
  (`torch.compile(fullgraph=True)`, CUDA graphs).
- The configuration travels as tensors as well: a changed setting needs no new graph.
- States are never changed in place. An older one stays readable, which is what a lazily read record relies on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyamp import LossScale, LossScaleState
from polyamp import state as portable

__all__ = ["ScaleRules", "ScaleState", "load_mapping", "place", "read", "rules", "to_mapping", "update"]

_INT32_MAX = 2**31 - 1


class ScaleState(NamedTuple):
    """`polyamp.LossScaleState` on a device: `scale` is float32, the counters are int32, all 0-d."""

    scale: Tensor
    good_steps: Tensor
    hysteresis_left: Tensor
    skipped: Tensor
    consecutive_skips: Tensor
    steps: Tensor


class ScaleRules(NamedTuple):
    """What the transition needs of `polyamp.LossScale`, as 0-d tensors: float32, int32, and bool for the two choices."""

    growth_factor: Tensor
    backoff_factor: Tensor
    min_scale: Tensor
    max_scale: Tensor
    growth_interval: Tensor
    hysteresis: Tensor
    dynamic: Tensor
    refill_on_finite: Tensor


def rules(config: LossScale, device: torch.device | str) -> ScaleRules:
    """Places a configuration on a device."""

    def float_(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=device)

    def int_(value: int) -> Tensor:
        return torch.tensor(value, dtype=torch.int32, device=device)

    def bool_(value: bool) -> Tensor:
        return torch.tensor(value, dtype=torch.bool, device=device)

    return ScaleRules(
        growth_factor=float_(config.growth_factor),
        backoff_factor=float_(config.backoff_factor),
        min_scale=float_(config.min_scale),
        max_scale=float_(config.max_scale),
        growth_interval=int_(config.growth_interval),
        hysteresis=int_(config.hysteresis),
        dynamic=bool_(config.kind == "dynamic"),
        refill_on_finite=bool_(config.hysteresis_refill == "finite"),
    )


def place(state: LossScaleState, device: torch.device | str) -> ScaleState:
    """Places a host state on a device."""
    counters = (state.good_steps, state.hysteresis_left, state.skipped, state.consecutive_skips, state.steps)
    return ScaleState(
        torch.tensor(state.scale, dtype=torch.float32, device=device),
        *(torch.tensor(value, dtype=torch.int32, device=device) for value in counters),
    )


def read(state: ScaleState) -> LossScaleState:
    """Reads a state on the host; waits for the device."""
    good_steps, hysteresis_left, skipped, consecutive_skips, steps = torch.stack(state[1:]).tolist()
    return LossScaleState(
        scale=state.scale.item(),
        good_steps=good_steps,
        hysteresis_left=hysteresis_left,
        skipped=skipped,
        consecutive_skips=consecutive_skips,
        steps=steps,
    )


def to_mapping(config: LossScale, state: ScaleState) -> dict[str, Any]:
    """Portable mapping (docs/spec.md, section 7); waits for the device."""
    return portable.state_dict(config, read(state))


def load_mapping(mapping: Mapping[str, Any], config: LossScale, device: torch.device | str) -> tuple[LossScale, ScaleState]:
    """Reads a portable mapping, or one of another library, onto a device.

    Raises:
        polyamp.StateError: the mapping can't be loaded.
    """
    config, state = portable.load_state_dict(mapping, config)
    return config, place(state, device)


def update(state: ScaleState, rule: ScaleRules, found_inf: Tensor) -> ScaleState:
    """The transition of one step.

    Args:
        state: state in force for the step.
        rule: configuration, from `rules`.
        found_inf: 0-d float32, 0.0 when all gradients were finite.

    Returns:
        The state for the next step, on the same device.
    """
    skip = found_inf != 0
    good_steps = state.good_steps + (state.good_steps < _INT32_MAX)
    due = rule.dynamic & ~skip & (good_steps >= rule.growth_interval)
    grown = state.scale * rule.growth_factor
    lowered = torch.maximum(state.scale * rule.backoff_factor, rule.min_scale)
    holds = rule.dynamic & skip & (state.hysteresis_left > 1)
    lowers = rule.dynamic & skip & (state.hysteresis_left <= 1)
    scale = torch.where(due & (grown <= rule.max_scale), grown, torch.where(lowers, lowered, state.scale))
    refills = torch.where(rule.refill_on_finite, ~skip, due)
    return ScaleState(
        scale=scale,
        good_steps=good_steps * ~(skip | due),
        hysteresis_left=torch.where(refills, rule.hysteresis, state.hysteresis_left - holds.int()),
        skipped=state.skipped + skip,
        consecutive_skips=(state.consecutive_skips + 1) * skip,
        steps=state.steps + 1,
    )
