"""Loss scale: the frozen configuration, its state, and the one transition that every backend implements natively.

Rules (docs/spec.md, section 3)

    update(state, finite):
        steps += 1
        if finite:
            consecutive_skips = 0
            good_steps += 1
            if hysteresis_refill == "finite": hysteresis_left = hysteresis
            if good_steps >= growth_interval:        # >=: a lowered interval or a restored counter never sticks
                if scale * growth_factor <= max_scale: scale *= growth_factor
                good_steps = 0                       # also when growth was refused
                if hysteresis_refill == "growth": hysteresis_left = hysteresis
        else:
            good_steps = 0; skipped += 1; consecutive_skips += 1
            if hysteresis_left > 1: hysteresis_left -= 1
            else: scale = max(scale * backoff_factor, min_scale)

- `scale` is float32 and every product is rounded once to float32; counters are int32.
- The scale in force for a step is the one before its update.
- Static scaling counts and skips by the same rules, and never moves the scale. `none` is static scaling by 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from polyamp.errors import LossScaleError, LossScaleStalled
from polyamp.presets import preset
from polyamp.scale_range import MAX_SCALE, MIN_SCALE, SMALLEST_NORMAL, float32

__all__ = ["LossScale", "LossScaleState"]

_INT32_MAX = 2**31 - 1

Kind = Literal["none", "static", "dynamic"]
Refill = Literal["finite", "growth"]


@dataclass(frozen=True, slots=True)
class LossScaleState:
    """State of a loss scale after some steps. Backends hold the same fields as 0-d device tensors.

    Attributes:
        scale: float32 scale in force for the next step.
        good_steps: finite steps since the last growth, refused growth or skip.
        hysteresis_left: non-finite steps, this one included, until the scale backs off.
        skipped: skipped steps in all.
        consecutive_skips: skipped steps since the last finite one.
        steps: steps in all.
    """

    scale: float
    good_steps: int = 0
    hysteresis_left: int = 1
    skipped: int = 0
    consecutive_skips: int = 0
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Configuration of loss scaling. Build it with `dynamic`, `static`, `none` or `like`; all values are validated there.

    Raises:
        LossScaleError: a value out of range; the message names the field, what was given and what is allowed.
    """

    kind: Kind
    init_scale: float
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    hysteresis_refill: Refill = "finite"
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**64
    max_consecutive_skips: int | None = 100
    check: bool = True

    def __post_init__(self) -> None:
        _validate(self)
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            object.__setattr__(self, name, float(getattr(self, name)))

    @classmethod
    def dynamic(
        cls,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        hysteresis_refill: Refill = "finite",
        min_scale: float = 2.0**-24,
        max_scale: float = 2.0**64,
        max_consecutive_skips: int | None = 100,
    ) -> LossScale:
        """Scale that grows after `growth_interval` finite steps in a row and backs off on a non-finite one.

        Args:
            init_scale: scale of step 0, within [min_scale, max_scale].
            growth_factor: > 1.
            backoff_factor: in (0, 1).
            growth_interval: consecutive finite steps until growth, >= 1.
            hysteresis: non-finite steps that it takes to back off, >= 1.
            hysteresis_refill: `"finite"` refills on every finite step, `"growth"` only on growth (Megatron).
            min_scale: floor, >= 2^-100.
            max_scale: ceiling, <= 2^100; growth beyond it is refused.
            max_consecutive_skips: skipped steps in a row after which `LossScaleStalled` is raised; None never raises.
        """
        return cls(
            kind="dynamic",
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            hysteresis_refill=hysteresis_refill,
            min_scale=min_scale,
            max_scale=max_scale,
            max_consecutive_skips=max_consecutive_skips,
        )

    @classmethod
    def static(cls, scale: float, *, max_consecutive_skips: int | None = 100) -> LossScale:
        """Fixed scale; finiteness is still checked and a non-finite step is still skipped."""
        return cls(kind="static", init_scale=scale, min_scale=MIN_SCALE, max_scale=MAX_SCALE, max_consecutive_skips=max_consecutive_skips)

    @classmethod
    def none(cls, *, check: bool = False, max_consecutive_skips: int | None = 100) -> LossScale:
        """No scaling. With `check=True` non-finite steps are still skipped, e.g. in bfloat16 runs."""
        return cls(kind="none", init_scale=1.0, check=check, max_consecutive_skips=max_consecutive_skips)

    @classmethod
    def like(cls, name: str, **overrides: Any) -> LossScale:
        """Configuration that reproduces another library's trajectory step by step: see `polyamp.presets`.

        Args:
            name: `"torch"`, `"jmp"`, `"flax"`, `"keras"`, `"tf_keras"`, `"apex"`, `"deepspeed"`, `"megatron"`, `"paddle"` or `"mindspore"`.
            **overrides: fields of `dynamic`, in that library's own meaning (flax: its own `growth_interval`).
        """
        known = cls.__dataclass_fields__.keys() - {"kind", "check"}
        unknown = sorted(set(overrides) - known)
        if unknown:
            raise LossScaleError(f"{name}: unknown override {', '.join(unknown)}; expected fields of LossScale.dynamic: {', '.join(sorted(known))}")
        return cls.dynamic(**preset(name, overrides))

    def init(self) -> LossScaleState:
        """State before step 0."""
        return LossScaleState(scale=float32(self.init_scale), hysteresis_left=self.hysteresis)

    def update(self, state: LossScaleState, finite: bool) -> LossScaleState:
        """The transition of section 3.2: pure, total, and the reference for every backend.

        Args:
            state: state in force for the step.
            finite: whether all gradients of the step's window are finite, raw and unscaled.

        Returns:
            The state for the next step.
        """
        dynamic = self.kind == "dynamic"
        scale, hysteresis_left = state.scale, state.hysteresis_left
        if finite:
            good_steps = state.good_steps + 1
            if self.hysteresis_refill == "finite":
                hysteresis_left = self.hysteresis
            if dynamic and good_steps >= self.growth_interval:
                grown = float32(scale * float32(self.growth_factor))
                scale = grown if grown <= float32(self.max_scale) else scale
                good_steps = 0
                if self.hysteresis_refill == "growth":
                    hysteresis_left = self.hysteresis
            good_steps = min(good_steps, _INT32_MAX)
            return replace(state, scale=scale, good_steps=good_steps, hysteresis_left=hysteresis_left, consecutive_skips=0, steps=state.steps + 1)
        if dynamic and hysteresis_left > 1:
            hysteresis_left -= 1
        elif dynamic:
            scale = max(float32(scale * float32(self.backoff_factor)), float32(self.min_scale))
        return LossScaleState(
            scale=scale,
            good_steps=0,
            hysteresis_left=hysteresis_left,
            skipped=state.skipped + 1,
            consecutive_skips=state.consecutive_skips + 1,
            steps=state.steps + 1,
        )

    def is_stalled(self, state: LossScaleState) -> bool:
        """Whether `max_consecutive_skips` is reached."""
        return self.max_consecutive_skips is not None and state.consecutive_skips >= self.max_consecutive_skips

    def stalled_error(
        self, consecutive_skips: int, scale: float, *, culprits: tuple[str, ...] = (), loss_finite: bool | None = None
    ) -> LossScaleStalled:
        """The error to raise on a stall, in the same words on every backend.

        Args:
            consecutive_skips: skipped steps in a row.
            scale: scale in force.
            culprits: names of the tensors that were non-finite, where the backend knows them.
            loss_finite: whether the loss itself was finite; False means a forward overflow, which no scale repairs.
        """
        text = f"{consecutive_skips} steps in a row were skipped (max_consecutive_skips={self.max_consecutive_skips}); scale is {scale:g}"
        if culprits:
            text += f"; non-finite gradients: {', '.join(culprits[:8])}{' ...' if len(culprits) > 8 else ''}"
        if loss_finite is False:
            text += ". The loss itself is not finite: the forward pass overflows, which no scale repairs; look at the data and at 16-bit ops"
        else:
            text += ". Look for NaN in the data or the model, a learning rate that diverged, or a min_scale that is too high"
        return LossScaleStalled(text)

    def check_scale(self, scale: float, field: str = "scale") -> float:
        """Validates a scale that is loaded or set by hand, and rounds it to float32.

        Args:
            scale: the value.
            field: what the message calls it.

        Raises:
            LossScaleError: not finite, not positive, or outside [min_scale, max_scale].
        """
        if not isinstance(scale, (int, float)) or isinstance(scale, bool):
            raise LossScaleError(f"{field}={scale!r}: expected a number")
        rounded = float32(scale)
        # Compared in float32: the floor that the transition lands on is float32(min_scale), which may lie below min_scale.
        if not float32(self.min_scale) <= rounded <= float32(self.max_scale):
            raise LossScaleError(f"{field}={scale!r}: expected a finite value within [min_scale={self.min_scale:g}, max_scale={self.max_scale:g}]")
        if self.kind == "none" and rounded != 1.0:
            raise LossScaleError(f"{field}={scale!r}: none() scales by 1; use static() or dynamic() for another scale")
        return rounded

    def __str__(self) -> str:
        if self.kind == "none":
            return "none(check=True)" if self.check else "none"
        if self.kind == "static":
            return f"static({self.init_scale:g})"
        defaults = LossScale.dynamic()
        changed = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != getattr(defaults, f.name)]
        return f"dynamic({', '.join(changed)})"


def _validate(config: LossScale) -> None:
    if config.kind not in ("none", "static", "dynamic"):
        raise LossScaleError(f"kind={config.kind!r}: expected 'none', 'static' or 'dynamic'")
    for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(float32(value)):
            raise LossScaleError(f"{name}={value!r}: expected a number that is finite in float32")
    if not MIN_SCALE <= config.min_scale <= config.max_scale <= MAX_SCALE:
        raise LossScaleError(
            f"min_scale={config.min_scale!r}, max_scale={config.max_scale!r}: expected 2^-100 <= min_scale <= max_scale <= 2^100, "
            "so that 1/scale stays a normal float32"
        )
    if not float32(config.growth_factor) > 1:
        raise LossScaleError(f"growth_factor={config.growth_factor!r}: expected a factor > 1 in float32, such as 2")
    if not SMALLEST_NORMAL <= float32(config.backoff_factor) < 1:  # a subnormal factor would be flushed to 0 by some backends
        raise LossScaleError(f"backoff_factor={config.backoff_factor!r}: expected a normal float32 in (0, 1), such as 0.5")
    for name in ("growth_interval", "hysteresis"):
        _check_count(name, getattr(config, name))
    if config.hysteresis_refill not in ("finite", "growth"):
        raise LossScaleError(f"hysteresis_refill={config.hysteresis_refill!r}: expected 'finite' or 'growth'")
    if config.max_consecutive_skips is not None:
        _check_count("max_consecutive_skips", config.max_consecutive_skips)
    if not isinstance(config.check, bool) or (config.kind != "none" and not config.check):
        raise LossScaleError(f"check={config.check!r}: a bool, and only none() may leave the check out")
    config.check_scale(config.init_scale, "init_scale")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _INT32_MAX:
        raise LossScaleError(f"{name}={value!r}: expected an integer >= 1 that fits int32")
