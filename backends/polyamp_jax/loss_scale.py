"""Loss scale as a pytree: device scalars, pure functions, the configuration as static metadata.

Rules (docs/spec.md, section 3)
- `scale` is float32 and the counters are int32, strongly typed 0-d arrays from the first state on: a jitted step compiles once.
- The configuration is part of the tree's structure. It survives flatten, jit, scan, vmap and checkpoints; floor and ceiling can't get lost.
- Building a state from leaves validates nothing, so that transformations may put any leaf there. Loading a mapping validates everything.
- Counters stay at 2^31 - 1 instead of wrapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

import polyamp.loss_scale as core
from polyamp.errors import MisuseError
from polyamp.loss_scale import LossScale
from polyamp.state import load_state_dict, state_dict

if TYPE_CHECKING:
    from jax import Array

__all__ = ["LossScaleState", "init", "scale", "unscale", "update"]

_VALUES = tuple(field.name for field in fields(core.LossScaleState))
_INT32_MAX = 2**31 - 1


@partial(jax.tree_util.register_dataclass, data_fields=_VALUES, meta_fields=("config",))
@dataclass(frozen=True)
class LossScaleState:
    """State of a loss scale; immutable, and every method returns new values.

        state = LossScaleState.init(LossScale.dynamic())
        grads = jax.grad(lambda p: state.scale_loss(loss(p)))(params)
        state = state.update(all_finite(grads))

    Attributes:
        scale: float32, 0-d: scale in force for the next step.
        good_steps: int32, 0-d: finite steps since the last growth, refused growth or skip.
        hysteresis_left: int32, 0-d: non-finite steps, this one included, until the scale backs off.
        skipped: int32, 0-d: skipped steps in all.
        consecutive_skips: int32, 0-d: skipped steps since the last finite one.
        steps: int32, 0-d: steps in all.
        config: configuration; static, hashable, not a leaf.
    """

    scale: Array
    good_steps: Array
    hysteresis_left: Array
    skipped: Array
    consecutive_skips: Array
    steps: Array
    config: LossScale

    @classmethod
    def init(cls, config: LossScale) -> LossScaleState:
        """State before step 0."""
        return cls._of(config, config.init())

    @property
    def last_skipped(self) -> Array:
        """Whether the latest step was skipped: bool, 0-d, False before step 0."""
        return self.consecutive_skips > jnp.int32(0)

    def scale_loss(self, loss: Any) -> Array:
        """See `scale`."""
        return scale(self, loss)

    def unscale(self, grads: Any) -> Any:
        """See `unscale`."""
        return unscale(self, grads)

    def update(self, finite: Array | bool) -> LossScaleState:
        """See `update`."""
        return update(self, finite)

    def state_dict(self) -> dict[str, Any]:
        """Portable mapping of numbers and strings: the same on every backend, JSON-able. Waits for the device; call it outside `jit`."""
        return state_dict(self.config, self.values())

    def values(self) -> core.LossScaleState:
        """The state as plain Python numbers. Waits for the device; call it outside `jit`.

        Raises:
            MisuseError: called under a transformation, or on a batch of states.
        """
        leaves = [getattr(self, name) for name in _VALUES]
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise MisuseError("the state has no values while it is traced; read it outside jit, from what the jitted step returned")
        if any(jnp.ndim(leaf) for leaf in leaves):
            raise MisuseError(f"expected 0-d state leaves, got scale of shape {jnp.shape(self.scale)}; pick one state of the batch first")
        return core.LossScaleState(*(leaf.item() for leaf in jax.device_get(leaves)))

    @classmethod
    def from_state_dict(cls, mapping: Mapping[str, Any], config: LossScale | None = None) -> LossScaleState:
        """State to continue with, from a mapping of any backend or of torch, Megatron or DeepSpeed.

        Args:
            mapping: what `state_dict` gave.
            config: what the mapping lacks, where it is another library's; `LossScale.dynamic()` by default.

        Raises:
            StateError: unknown version or layout, or a value out of range.
        """
        return cls._of(*load_state_dict(mapping, LossScale.dynamic() if config is None else config))

    @classmethod
    def _of(cls, config: LossScale, values: core.LossScaleState) -> LossScaleState:
        counters = {name: jnp.array(getattr(values, name), jnp.int32) for name in _VALUES[1:]}
        return cls(scale=jnp.array(values.scale, jnp.float32), config=config, **counters)


def init(config: LossScale) -> LossScaleState:
    """State before step 0."""
    return LossScaleState.init(config)


def scale(state: LossScaleState, loss: Any) -> Array:
    """Scales a loss in float32, so that a float16 loss can't overflow here.

    Args:
        state: state in force.
        loss: floating, any shape and dtype.

    Returns:
        float32, shape of `loss`.

    Raises:
        MisuseError: a loss that is not real and floating.
    """
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise MisuseError(f"expected a floating loss, got dtype {jnp.result_type(loss)}; cast it to float32")
    return jnp.asarray(loss).astype(jnp.float32) * state.scale


def unscale(state: LossScaleState, grads: Any) -> Any:
    """Takes the scale out of gradients: multiplies by its float32 reciprocal, which is exact for powers of two.

    A true division would nearly double the time of an AdamW step on a CPU. 1 / scale is a normal float32 over the whole allowed range.

    Args:
        state: state in force when the loss was scaled.
        grads: scaled gradients, any floating or complex dtype; other leaves are returned as they are.

    Returns:
        The same tree; floating leaves are float32, complex ones keep their dtype.
    """
    inverse = jnp.float32(1) / state.scale

    def multiply(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
            # Part by part: a complex product would turn an infinity into NaN.
            factor = inverse.astype(leaf.real.dtype)
            return jax.lax.complex(leaf.real * factor, leaf.imag * factor)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf.astype(jnp.float32) * inverse
        return leaf

    return jax.tree.map(multiply, grads)


def update(state: LossScaleState, finite: Array | bool) -> LossScaleState:
    """The transition of docs/spec.md, section 3.2.

    Args:
        state: state in force for the step.
        finite: bool, 0-d: whether all gradients of the step's window are finite, raw and unscaled.

    Returns:
        The state for the next step; same structure, shapes and dtypes.
    """
    config = state.config
    finite = jnp.asarray(finite, jnp.bool_)
    zero, full = jnp.int32(0), jnp.int32(config.hysteresis)
    good_steps = _increment(state.good_steps)
    grow = (good_steps >= jnp.int32(config.growth_interval)) if config.kind == "dynamic" else jnp.zeros((), jnp.bool_)
    refill = jnp.ones((), jnp.bool_) if config.hysteresis_refill == "finite" else grow
    after_finite = replace(
        state,
        scale=jnp.where(grow, _grown(state.scale, config), state.scale),
        good_steps=jnp.where(grow, zero, good_steps),
        hysteresis_left=jnp.where(refill, full, state.hysteresis_left),
        consecutive_skips=zero,
    )
    tolerated = state.hysteresis_left > jnp.int32(1)
    after_skip = replace(
        state,
        scale=jnp.where(tolerated, state.scale, _backed_off(state.scale, config)),
        good_steps=zero,
        hysteresis_left=jnp.where(tolerated, state.hysteresis_left - jnp.int32(1), state.hysteresis_left)
        if config.kind == "dynamic"
        else state.hysteresis_left,
        skipped=_increment(state.skipped),
        consecutive_skips=_increment(state.consecutive_skips),
    )
    chosen = jax.tree.map(lambda a, b: jnp.where(finite, a, b), after_finite, after_skip)
    return replace(chosen, steps=_increment(state.steps))


def _grown(value: Array, config: LossScale) -> Array:
    grown = value * jnp.float32(config.growth_factor)
    return jnp.where(grown <= jnp.float32(config.max_scale), grown, value)


def _backed_off(value: Array, config: LossScale) -> Array:
    if config.kind != "dynamic":
        return value
    return jnp.maximum(value * jnp.float32(config.backoff_factor), jnp.float32(config.min_scale))


def _increment(counter: Array) -> Array:
    return jnp.where(counter < jnp.int32(_INT32_MAX), counter + jnp.int32(1), counter)
