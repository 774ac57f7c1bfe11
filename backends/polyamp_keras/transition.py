"""The transition of the loss scale in Keras operations: branch-free, so that one trace serves every outcome.

Rules (docs/spec.md, section 3.2)
- The same arithmetic as `polyamp.LossScale.update`: the scale is float32, every product is rounded once, counters are int32.
- What a loaded state may change (factors, bounds, intervals, kind) is read from tensors, so that a train function that is compiled
  already obeys it. `check` alone is static: it decides whether gradients are looked at.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from keras import ops

from polyamp import LossScale
from polyamp.scale_range import float32

__all__ = ["FACTORS", "SWITCHES", "ScaleTensors", "advance", "config_from_settings", "settings_from_config"]

Tensor = Any

_INT32_MAX = 2**31 - 1
_KINDS = ("none", "static", "dynamic")
_REFILLS = ("finite", "growth")

FACTORS = ("growth_factor", "backoff_factor", "min_scale", "max_scale", "init_scale")
"""Order of the float32 settings tensor."""

SWITCHES = ("kind", "growth_interval", "hysteresis", "hysteresis_refill", "max_consecutive_skips", "check")
"""Order of the int32 settings tensor; kinds and refills by position, 0 for no `max_consecutive_skips`."""


class ScaleTensors(NamedTuple):
    """Fields of `polyamp.LossScaleState` as 0-d tensors or variables: scale float32, the rest int32."""

    scale: Tensor
    good_steps: Tensor
    hysteresis_left: Tensor
    skipped: Tensor
    consecutive_skips: Tensor
    steps: Tensor


def advance(state: ScaleTensors, finite: Tensor, factors: Tensor, switches: Tensor) -> ScaleTensors:
    """State after one step.

    Args:
        state: state in force for the step.
        finite: bool, 0-d.
        factors: float32, (5,), in the order of `FACTORS`.
        switches: int32, (6,), in the order of `SWITCHES`.
    """
    growth_factor, backoff_factor, min_scale, max_scale = factors[0], factors[1], factors[2], factors[3]
    dynamic = ops.equal(switches[0], _KINDS.index("dynamic"))
    growth_interval, hysteresis = switches[1], switches[2]
    refill_when_finite = ops.equal(switches[3], _REFILLS.index("finite"))

    zero, one = ops.zeros_like(state.steps), ops.ones_like(state.steps)
    good_steps = ops.where(ops.less(state.good_steps, _INT32_MAX), state.good_steps + one, state.good_steps)
    full = ops.logical_and(dynamic, ops.greater_equal(good_steps, growth_interval))
    grown = ops.multiply(state.scale, growth_factor)
    grows = ops.logical_and(full, ops.less_equal(grown, max_scale))
    refills = ops.logical_or(refill_when_finite, full)
    waits = ops.logical_and(dynamic, ops.greater(state.hysteresis_left, 1))
    backs_off = ops.logical_and(dynamic, ops.logical_not(waits))
    shrunk = ops.maximum(ops.multiply(state.scale, backoff_factor), min_scale)

    def choose(taken: Tensor, skipped: Tensor) -> Tensor:
        return ops.where(finite, taken, skipped)

    return ScaleTensors(
        scale=choose(ops.where(grows, grown, state.scale), ops.where(backs_off, shrunk, state.scale)),
        good_steps=choose(ops.where(full, zero, good_steps), zero),
        hysteresis_left=choose(
            ops.where(refills, hysteresis, state.hysteresis_left), ops.where(waits, state.hysteresis_left - one, state.hysteresis_left)
        ),
        skipped=choose(state.skipped, state.skipped + one),
        consecutive_skips=choose(zero, state.consecutive_skips + one),
        steps=state.steps + one,
    )


def settings_from_config(config: LossScale) -> tuple[list[float], list[int]]:
    """Values of the two settings tensors, in the order of `FACTORS` and `SWITCHES`."""
    factors = [getattr(config, name) for name in FACTORS]
    switches = [
        _KINDS.index(config.kind),
        config.growth_interval,
        config.hysteresis,
        _REFILLS.index(config.hysteresis_refill),
        config.max_consecutive_skips or 0,
        int(config.check),
    ]
    return factors, switches


def config_from_settings(factors: list[float], switches: list[int], current: LossScale) -> LossScale:
    """Configuration that the two settings tensors hold.

    Args:
        factors: values in the order of `FACTORS`, rounded to float32.
        switches: values in the order of `SWITCHES`.
        current: configuration in force; a factor that rounds to the same float32 keeps its value from there, so that equal settings compare equal.

    Raises:
        LossScaleError: a value out of range.
    """
    kept = {name: getattr(current, name) for name in FACTORS}
    values: dict[str, Any] = {name: kept[name] if float32(kept[name]) == value else value for name, value in zip(FACTORS, factors, strict=True)}
    kind, growth_interval, hysteresis, refill, max_consecutive_skips, check = switches
    return LossScale(
        kind=_at(_KINDS, kind),
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        hysteresis_refill=_at(_REFILLS, refill),
        max_consecutive_skips=max_consecutive_skips or None,
        check=bool(check),
        **values,
    )


def _at(words: tuple[str, ...], position: int) -> Any:
    return words[position] if 0 <= position < len(words) else position
