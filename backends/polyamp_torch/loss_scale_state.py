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
    """What the transition needs of `polyamp.LossScale`, as 0-d tensors.

    A scale that is not dynamic has the factors 1, an interval that no counter reaches, and a count that hysteresis never exceeds; so it
    runs through the same operations and stays where it is.

    Attributes:
        growth_factor: float32.
        backoff_factor: float32.
        min_scale: float32.
        max_scale: float32.
        growth_interval: int64.
        hysteresis: int32.
        hold_above: int32; a skip holds the scale while more of the hysteresis is left.
        refill_on_finite: bool.
    """

    growth_factor: Tensor
    backoff_factor: Tensor
    min_scale: Tensor
    max_scale: Tensor
    growth_interval: Tensor
    hysteresis: Tensor
    hold_above: Tensor
    refill_on_finite: Tensor


def rules(config: LossScale, device: torch.device | str) -> ScaleRules:
    """Places a configuration on a device."""

    dynamic = config.kind == "dynamic"

    def tensor(value: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=device)

    return ScaleRules(
        growth_factor=tensor(config.growth_factor if dynamic else 1.0, torch.float32),
        backoff_factor=tensor(config.backoff_factor if dynamic else 1.0, torch.float32),
        min_scale=tensor(config.min_scale, torch.float32),
        max_scale=tensor(config.max_scale, torch.float32),
        growth_interval=tensor(config.growth_interval if dynamic else _INT32_MAX + 1, torch.int64),
        hysteresis=tensor(config.hysteresis, torch.int32),
        hold_above=tensor(1 if dynamic else _INT32_MAX, torch.int32),
        refill_on_finite=tensor(config.hysteresis_refill == "finite", torch.bool),
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
    finite = ~skip
    good_steps = state.good_steps + (state.good_steps < _INT32_MAX)
    counts_on = finite & (good_steps < rule.growth_interval)
    due = finite ^ counts_on
    holds = skip & (state.hysteresis_left > rule.hold_above)
    lowers = skip ^ holds
    grown = state.scale * rule.growth_factor
    lowered = torch.maximum(state.scale * rule.backoff_factor, rule.min_scale)
    refills = torch.where(rule.refill_on_finite, finite, due)
    return ScaleState(
        scale=torch.where(due & (grown <= rule.max_scale), grown, torch.where(lowers, lowered, state.scale)),
        good_steps=good_steps * counts_on,
        hysteresis_left=torch.where(refills, rule.hysteresis, state.hysteresis_left - holds.int()),
        skipped=state.skipped + skip,
        consecutive_skips=(state.consecutive_skips + 1) * skip,
        steps=state.steps + 1,
    )
