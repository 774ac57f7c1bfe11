"""MixedPrecision: float32 masters, 16-bit computation, loss scaling and the skipped step, as pure functions over one state.

Rules (docs/spec.md, sections 4 and 5)
- Masters are cast to the compute dtype inside the differentiated function: gradients arrive in float32, with the rounding and the
  overflow of the compute dtype in them.
- Gradients stay scaled between `value_and_grad` and `apply_gradients`, which checks them raw, unscales in float32 and steps.
- A skipped step changes the loss scale and nothing else: parameters, moments, step counts and schedules stay.
- Structure, shapes and dtypes of the state never change, so that a jitted step compiles once and may donate its state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import optax

from polyamp.errors import LossScaleError, MisuseError
from polyamp.loss_scale import LossScale
from polyamp.policy import Policy
from polyamp_jax.casting import cast_floating, combine, differentiable, masters, strong
from polyamp_jax.finite import all_finite, select
from polyamp_jax.loss_scale import LossScaleState, scale, unscale, update

if TYPE_CHECKING:
    from jax import Array

__all__ = ["MixedPrecision", "TrainState"]


@partial(jax.tree_util.register_dataclass, data_fields=("params", "opt_state", "loss_scale"), meta_fields=())
@dataclass(frozen=True)
class TrainState:
    """Everything that a training step carries.

    Attributes:
        params: masters: floating leaves float32, others as they were given.
        opt_state: state of the optax transformation, over the differentiable leaves of `params`.
        loss_scale: `polyamp_jax.LossScaleState`; its `last_skipped` tells whether the latest step was skipped.
    """

    params: Any
    opt_state: Any
    loss_scale: LossScaleState


class MixedPrecision:
    """Mixed-precision training of any JAX model with any optax optimizer.

        mp = MixedPrecision("mixed_float16", optax.adamw(1e-3))
        state = mp.init(params)

        @partial(jax.jit, donate_argnums=0)
        def step(state, x, y):
            loss, grads = mp.value_and_grad(loss_fn)(state, x, y)     # loss unscaled, grads scaled
            return mp.apply_gradients(state, grads), loss             # checks, unscales, steps or skips

    where `loss_fn(params, x, y)` gets its parameters in the compute dtype. Arguments are passed as they are: cast what the model
    computes with by `mp.cast_to_compute(x)`, or let flax modules do it by their `dtype`.

    Args:
        policy: `polyamp.Policy`, or a text or alias such as `"mixed_bfloat16"`. The state holds float32 masters under every policy;
            `cast_to_param` gives parameters in `param_dtype`.
        tx: optax gradient transformation. It sees unscaled float32 gradients, so clipping in its chain is right.
        loss_scale: by default dynamic for float16 computation, none for others.
        skip: how a skipped step leaves the state as it was. `"cond"` runs the optimizer only when gradients are finite, which is the
            faster one on a CPU; `"where"` always runs it and selects, for accelerators or transformations that dislike a branch.

    Raises:
        PolicyError: an unknown policy.
        LossScaleError: `skip` or `loss_scale` is not one of the above.
    """

    def __init__(
        self,
        policy: Policy | str,
        tx: optax.GradientTransformation,
        loss_scale: LossScale | None = None,
        *,
        skip: Literal["cond", "where"] = "cond",
    ) -> None:
        if skip not in ("cond", "where"):
            raise LossScaleError(f"skip={skip!r}: expected 'cond' (run the optimizer on finite gradients only) or 'where' (run it and select)")
        if loss_scale is not None and not isinstance(loss_scale, LossScale):
            raise LossScaleError(
                f"loss_scale is a {type(loss_scale).__name__}; expected a configuration such as polyamp.LossScale.dynamic(), "
                "or None for the policy's own"
            )
        self.policy = Policy(policy)
        if loss_scale is None:
            loss_scale = LossScale.dynamic() if self.policy.needs_loss_scale else LossScale.none()
        self.loss_scale = loss_scale
        self.tx = optax.with_extra_args_support(tx)
        self.skip = skip

    def init(self, params: Any) -> TrainState:
        """State before step 0. Parameters are copied: donating the state leaves the caller's arrays alive.

        Args:
            params: pytree of arrays and numbers; None leaves and empty trees are fine.

        Raises:
            MisuseError: a leaf that is neither an array nor a number.
        """
        copies = masters(params)
        return TrainState(copies, strong(self.tx.init(differentiable(copies))), LossScaleState.init(self.loss_scale))

    def value_and_grad(self, loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
        """Wraps a loss function into one that gives its value and the gradients of the masters.

        Args:
            loss_fn: `loss_fn(params, *args, **kwargs)` returns a real floating scalar, or with `has_aux` a pair of it and anything.
                It gets floating parameters in the compute dtype. Compute the loss itself in float32: its cotangent is the scale, and a
                float16 loss can't carry one beyond 65504, so that such steps are skipped until the scale has backed off.
            has_aux: whether `loss_fn` returns a pair.

        Returns:
            A function of `(state, *args, **kwargs)` that returns `(loss, grads)`, or `((loss, aux), grads)` with `has_aux`. `loss` is
            float32 and not scaled. `grads` has the structure of `state.params`, float32 and *scaled*, with None where a leaf has no
            gradient; hand it to `apply_gradients`, or to `state.loss_scale.unscale` for a look at the true values.
        """

        def wrapped(state: TrainState, *args: Any, **kwargs: Any) -> Any:
            def scaled(trainable: Any) -> tuple[Array, tuple[Array, Any]]:
                result = loss_fn(self.cast_to_compute(combine(trainable, state.params)), *args, **kwargs)
                loss, aux = result if has_aux else (result, None)
                scaled_loss = scale(state.loss_scale, loss)
                return scaled_loss, (jnp.asarray(loss).astype(jnp.float32), aux)

            (_, (loss, aux)), grads = jax.value_and_grad(scaled, has_aux=True)(differentiable(state.params))
            return ((loss, aux) if has_aux else loss), grads

        return wrapped

    def apply_gradients(self, state: TrainState, grads: Any, **extra: Any) -> TrainState:
        """Checks scaled gradients, and either unscales them and steps, or skips; then updates the loss scale.

        Args:
            state: state from which the gradients were computed.
            grads: scaled gradients, as `value_and_grad` returns them; any floating dtype.
            **extra: passed to optax transformations that take extra arguments.

        Returns:
            The state for the next step. `state.loss_scale.last_skipped` tells what happened.

        Raises:
            MisuseError: the tree of gradients is not that of the parameters.
        """
        trainable = differentiable(state.params)
        _check_structure(trainable, grads)
        finite = self._verdict(state.loss_scale, grads)

        def step() -> tuple[Any, Any]:
            updates, opt_state = self.tx.update(unscale(state.loss_scale, grads), state.opt_state, trainable, **extra)
            return optax.apply_updates(trainable, updates), _like(opt_state, state.opt_state)

        def keep() -> tuple[Any, Any]:
            return trainable, state.opt_state

        if not state.loss_scale.config.check:
            moved = step()
        elif self.skip == "cond":
            moved = jax.lax.cond(finite, step, keep)
        else:
            moved = select(finite, step(), keep())
        return replace(state, params=combine(moved[0], state.params), opt_state=moved[1], loss_scale=update(state.loss_scale, finite))

    def cast_to_compute(self, tree: Any) -> Any:
        """Casts floating leaves to the policy's compute dtype."""
        return cast_floating(tree, self.policy.compute_dtype)

    def cast_to_param(self, tree: Any) -> Any:
        """Casts floating leaves to the policy's param dtype: parameters as a model publishes them."""
        return cast_floating(tree, self.policy.param_dtype)

    def cast_to_output(self, tree: Any) -> Any:
        """Casts floating leaves to the policy's output dtype."""
        return cast_floating(tree, self.policy.output_dtype)

    def __repr__(self) -> str:
        return f"MixedPrecision({str(self.policy)!r}, loss_scale={self.loss_scale}, skip={self.skip!r})"

    def _verdict(self, state: LossScaleState, grads: Any) -> Array:
        if not state.config.check:
            return jnp.ones((), jnp.bool_)
        raw = all_finite(grads)
        if state.config.kind == "dynamic" and state.config.min_scale >= 1:
            return raw
        # Dividing by a scale below 1 can overflow a finite gradient. The second pass runs only then.
        return jax.lax.cond(state.scale < jnp.float32(1), lambda: raw & all_finite(unscale(state, grads)), lambda: raw)


def _check_structure(trainable: Any, grads: Any) -> None:
    expected, given = jax.tree.structure(trainable), jax.tree.structure(grads)
    if expected != given:
        raise MisuseError(
            f"gradients have the structure {given}, but the differentiable parameters have {expected}; pass what "
            "value_and_grad returned for this state (None where a leaf has no gradient, zeros where the loss does not depend on it)"
        )


def _like(new: Any, old: Any) -> Any:
    """Optimizers may promote what they carry; the state's dtypes are invariant."""
    return jax.tree.map(lambda a, b: jnp.asarray(a).astype(b.dtype), new, old)
