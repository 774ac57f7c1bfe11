"""LossScaleOptimizer: the spec's loss scale round any Keras optimizer, inside stock `compile` and `fit`.

Rules (docs/spec.md, sections 3, 4 and 7)
- A subclass of Keras' own class, because `compile` wraps every other optimizer of a mixed_float16 model once more.
- Scale, counters and settings are Keras variables that exist from the constructor on. They travel with `.keras` files, `save_weights` and
  the state of JAX train functions; a loaded setting takes effect in train functions that are compiled already.
- One step: verdict on raw and unscaled gradients; the inner optimizer runs on float32 gradients, or nothing of it moves; one transition.
- Nothing is read on the host, but for the decision itself where the backend runs eagerly.
- The verdict is per call of `apply`: with `gradient_accumulation_steps` of the inner optimizer, per micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from typing import Any

import keras
import numpy as np
from keras import ops

from polyamp import LossScale, LossScaleError, LossScaleState, MisuseError, StateError, StepRecord, UnsupportedError
from polyamp import state as portable
from polyamp_keras import native
from polyamp_keras.configuration import as_inner_optimizer, as_loss_scale
from polyamp_keras.gradients import all_finite, only_nan, unscale
from polyamp_keras.step_ring import NO_GRADIENTS, NONFINITE_INF, NONFINITE_NAN, TAKEN, StepRing
from polyamp_keras.transition import ScaleTensors, advance, config_from_settings, settings_from_config

__all__ = ["LossScaleOptimizer"]

Tensor = Any

# Positions of these two among the variables that the stock class saves, by name here.
_STOCK_KEYS = {"2": "step_counter", "3": "dynamic_scale"}


@keras.saving.register_keras_serializable(package="polyamp")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scales the loss, skips steps whose gradients are not finite, and moves the scale by the spec's rules.

    Use it where `keras.optimizers.LossScaleOptimizer` would stand; a mixed_float16 model takes it as it is.

    Args:
        inner: optimizer to wrap, its name, or its Keras config.
        loss_scale: a `polyamp.LossScale`, a preset's name (`"torch"`, `"keras"`, `"megatron"` ...), a number for static scaling, or None for
            `LossScale.dynamic()`.
        name: name of the optimizer.
        ring_capacity: steps that are kept on the device until the trace reads them, at least 2.

    Attributes:
        inner_optimizer: the wrapped optimizer.
        loss_scale: configuration in force.
        dynamic_scale: the scale, a float32 variable.
        step_counter: finite steps since the last growth, refused growth or skip, an int32 variable.

    Raises:
        LossScaleError: a loss scale out of range, or an inner optimizer that scales by itself.

    Example:
        >>> keras.config.set_dtype_policy("mixed_float16")
        >>> optimizer = polyamp_keras.LossScaleOptimizer("adam", loss_scale=polyamp.LossScale.dynamic(growth_interval=500))
        >>> model.compile(optimizer=optimizer, loss="mse")
        >>> model.fit(x, y, callbacks=[polyamp_keras.MixedPrecision(trace="run.jsonl")])
    """

    def __init__(
        self,
        inner: keras.optimizers.Optimizer | str | Mapping[str, Any],
        loss_scale: LossScale | str | float | None = None,
        name: str | None = None,
        *,
        ring_capacity: int = 1024,
    ) -> None:
        config = as_loss_scale(loss_scale)
        optimizer = as_inner_optimizer(inner)
        if isinstance(ring_capacity, bool) or not isinstance(ring_capacity, int) or ring_capacity < 2:
            raise LossScaleError(f"ring_capacity={ring_capacity!r}: expected an integer >= 2, the steps kept on the device between two reads")
        super().__init__(optimizer, initial_scale=config.init_scale, dynamic_growth_steps=config.growth_interval, name=name)
        self._loss_scale = config
        self._check_is_traced = False
        state = config.init()
        factors, switches = settings_from_config(config)
        self.dynamic_scale = self._scalar("dynamic_scale", state.scale, "float32")
        self.step_counter = self._scalar("step_counter", state.good_steps, "int32")
        self._hysteresis_left = self._scalar("hysteresis_left", state.hysteresis_left, "int32")
        self._skipped = self._scalar("skipped", state.skipped, "int32")
        self._consecutive_skips = self._scalar("consecutive_skips", state.consecutive_skips, "int32")
        self._steps = self._scalar("steps", state.steps, "int32")
        self._factors = self._vector("factors", factors, "float32")
        self._switches = self._vector("switches", switches, "int32")
        self._ring_scales = self.add_variable((ring_capacity, 2), "zeros", dtype="float32", aggregation="none", name="ring_scales")
        self._ring_marks = self.add_variable((ring_capacity, 2), "zeros", dtype="int32", aggregation="none", name="ring_marks")
        self._ring = StepRing(self._ring_scales, self._ring_marks)
        self._ring.clear()

    @property
    def loss_scale(self) -> LossScale:
        """Configuration in force."""
        return self._loss_scale

    @property
    def ring_capacity(self) -> int:
        """Steps that are kept on the device until the trace reads them."""
        return self._ring.capacity

    @property
    def iterations(self) -> Any:
        """Steps that the inner optimizer has taken; skipped ones don't count."""
        return self.inner_optimizer.iterations

    # Keras calls build with the trainable variables before the first step, more than once when a model is loaded.
    def build(self, var_list: Sequence[Any]) -> None:
        if self.built:
            return
        self.inner_optimizer.build(var_list)
        # Past the parent, whose build would create its own scale and counter.
        super(keras.optimizers.LossScaleOptimizer, self).build(var_list)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Loss times the scale in force, in float32."""
        return ops.multiply(ops.cast(loss, "float32"), self.dynamic_scale.value)

    def apply(self, grads: Sequence[Tensor | None], trainable_variables: Sequence[Any] | None = None) -> None:
        """One step with the gradients of the scaled loss: verdict, unscale, inner optimizer or skip, transition.

        Args:
            grads: gradients of `scale_loss(loss)`, one a variable; None where there is none.
            trainable_variables: the variables; left out once the optimizer is built on them.

        Raises:
            MisuseError: not built and no variables given, or the numbers of gradients and variables differ.
        """
        grads = list(grads)
        if not grads:
            return
        variables = self._resolve(grads, trainable_variables)
        self._check_is_traced = True
        if native.BACKEND == "jax":
            values, optimizer_values = self._functional_step(
                [v.value for v in self.variables], grads, [v.value for v in self._trainable_variables], variables
            )
            for variable, value in zip([*self._trainable_variables, *self.variables], [*values, *optimizer_values], strict=True):
                variable.assign(value)
        elif native.in_merge_call_strategy():
            native.merge_replicas(
                grads,
                verdict=lambda g: self._verdict(self._unscale(g, variables)),
                take=lambda g: self._take(self._unscale(g, variables), variables),
                skip=self._skip,
                finish=self._finish,
            )
        else:
            unscaled = self._unscale(grads, variables)
            finite = native.reduce_over_replicas(self._verdict(unscaled))
            code = native.branch(finite, lambda: self._take(unscaled, variables), lambda: self._skip(grads))
            self._finish(finite, code)

    def stateless_apply(
        self, optimizer_variables: Sequence[Tensor], grads: Sequence[Tensor | None], trainable_variables: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """`apply` as a pure function of values, for JAX loops (and torch); the variables stay as they are.

        Args:
            optimizer_variables: values of `self.variables`.
            grads: gradients of the scaled loss, one a trainable variable.
            trainable_variables: values of the variables that the optimizer was built on.

        Returns:
            New values of the trainable variables, and of the optimizer's.

        Raises:
            MisuseError: not built, or a list of another length.
            UnsupportedError: on the TensorFlow backend, whose optimizers have no stateless form.
        """
        if native.BACKEND == "tensorflow":
            raise UnsupportedError("stateless_apply doesn't exist on the TensorFlow backend; call apply(), inside tf.function or eagerly")
        if not self.built:
            raise MisuseError("stateless_apply needs a built optimizer; call optimizer.build(model.trainable_variables) first")
        given = (len(optimizer_variables), len(grads), len(trainable_variables))
        expected = (len(self.variables), len(self._trainable_variables), len(self._trainable_variables))
        if given != expected:
            raise MisuseError(
                f"stateless_apply got {given[0]} optimizer values, {given[1]} gradients and {given[2]} variable values; expected "
                f"{expected[0]}, {expected[1]} and {expected[2]}, in the order of optimizer.variables and of the variables it was built on"
            )
        self._check_is_traced = True
        return self._functional_step(optimizer_variables, list(grads), trainable_variables, self._trainable_variables)

    def state_dict(self) -> dict[str, Any]:
        """Portable, JSON-able mapping of configuration, scale and counters; the same on every backend of polyamp. Reads the device."""
        return portable.state_dict(self._loss_scale, self._host_state())

    def load_state_dict(self, mapping: Mapping[str, Any]) -> None:
        """Continues from a mapping of `state_dict`, of any backend, or of torch, Megatron or DeepSpeed. The inner optimizer stays as it is.

        A loaded configuration takes effect in train functions that are compiled already.

        Raises:
            StateError: a mapping that can't be loaded; nothing is changed.
        """
        config, state = portable.load_state_dict(mapping, self._loss_scale)
        self._restore(config, state)

    def recent_steps(self, since: int = 0) -> tuple[StepRecord, ...]:
        """Records of the steps from `since` on that the ring still holds, in order. Reads the device once."""
        return self._ring.read(since, self._host_state().steps)

    def save_own_variables(self, store: Any) -> None:
        """Scale, counters and settings, by name. Keras saves the inner optimizer beside them; the ring is working memory and is left out."""
        for variable in self._saved_variables():
            store[variable.name] = native.host(variable)

    def load_own_variables(self, store: Any) -> None:
        """Reads what `save_own_variables` wrote, settings included, or the scale and counter of Keras' stock class.

        Raises:
            StateError: another layout, or values out of range; nothing is changed.
        """
        names, keys = [variable.name for variable in self._saved_variables()], set(store.keys())
        if keys.issuperset(names):
            values = {name: np.asarray(store[name]) for name in names}
        elif keys.issuperset(_STOCK_KEYS):
            values = {name: native.host(variable) for name, variable in zip(names, self._saved_variables(), strict=True)}
            values |= {name: np.asarray(store[key]) for key, name in _STOCK_KEYS.items()}
        else:
            raise StateError(f"the file's state for optimizer {self.name!r} has {', '.join(sorted(keys))}; expected {', '.join(names)}")
        try:
            config = config_from_settings(values["factors"].tolist(), values["switches"].tolist(), self._loss_scale)
            state = LossScaleState(*(values[variable.name].item() for variable in self._state_variables()))
            config, state = portable.load_state_dict(portable.state_dict(config, state), config)
        except (LossScaleError, StateError, ValueError) as error:
            raise StateError(f"the file's loss scale for optimizer {self.name!r} can't be loaded: {error}") from error
        self._restore(config, state)

    def get_config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "loss_scale": asdict(self._loss_scale),
            "ring_capacity": self.ring_capacity,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> LossScaleOptimizer:
        values = dict(config)
        inner = keras.saving.deserialize_keras_object(values.pop("inner_optimizer"), custom_objects=custom_objects)
        return cls(inner, **values)

    def _scalar(self, name: str, value: float, dtype: str) -> Any:
        return self.add_variable((), keras.initializers.Constant(value), dtype=dtype, aggregation="none", name=name)

    def _vector(self, name: str, values: Sequence[float], dtype: str) -> Any:
        variable = self.add_variable((len(values),), "zeros", dtype=dtype, aggregation="none", name=name)
        variable.assign(np.asarray(values, dtype=dtype))
        return variable

    def _state_variables(self) -> ScaleTensors:
        return ScaleTensors(self.dynamic_scale, self.step_counter, self._hysteresis_left, self._skipped, self._consecutive_skips, self._steps)

    def _saved_variables(self) -> list[Any]:
        return [*self._state_variables(), self._factors, self._switches]

    def _host_state(self) -> LossScaleState:
        return LossScaleState(*(native.host(variable).item() for variable in self._state_variables()))

    def _restore(self, config: LossScale, state: LossScaleState) -> None:
        if config.check != self._loss_scale.check and self._check_is_traced:
            raise StateError(
                f"the state has check={config.check}, this optimizer has already taken steps with check={self._loss_scale.check}, which compiled "
                f"train functions can't change; load before the first step, or build the optimizer with loss_scale={config}"
            )
        factors, switches = settings_from_config(config)
        for variable, value in zip(self._saved_variables(), [*astuple(state), factors, switches], strict=True):
            variable.assign(np.asarray(value, dtype=variable.dtype))
        self._loss_scale = config
        self.initial_scale = config.init_scale
        self.dynamic_growth_steps = config.growth_interval
        self._ring.clear()

    def _resolve(self, grads: list[Tensor | None], trainable_variables: Sequence[Any] | None) -> list[Any]:
        if trainable_variables is None:
            if not self.built:
                raise MisuseError("apply() of an optimizer that is not built needs the variables: apply(grads, trainable_variables)")
            variables = list(self._trainable_variables)
        else:
            variables = list(trainable_variables)
            if not self.built:
                with keras.name_scope(self.name, caller=self):
                    self.build(variables)
        if len(grads) != len(variables):
            raise MisuseError(f"apply() got {len(grads)} gradients for {len(variables)} variables; pass one a variable, None where there is none")
        return variables

    def _unscale(self, grads: Sequence[Tensor | None], variables: Sequence[Any]) -> list[Tensor | None]:
        return unscale(grads, variables, self.dynamic_scale.value)

    def _verdict(self, unscaled: Sequence[Tensor | None]) -> Tensor:
        return all_finite(unscaled if self._loss_scale.check else ())

    def _take(self, unscaled: Sequence[Tensor | None], variables: Sequence[Any]) -> Tensor:
        if all(gradient is None for gradient in unscaled):
            return ops.convert_to_tensor(NO_GRADIENTS, dtype="int32")
        self.inner_optimizer.apply(unscaled, variables)
        return ops.convert_to_tensor(TAKEN, dtype="int32")

    def _skip(self, grads: Sequence[Tensor | None]) -> Tensor:
        return ops.where(only_nan(grads), ops.convert_to_tensor(NONFINITE_NAN, dtype="int32"), ops.convert_to_tensor(NONFINITE_INF, dtype="int32"))

    def _finish(self, finite: Tensor, code: Tensor) -> None:
        before = ScaleTensors(*(variable.value for variable in self._state_variables()))
        after = advance(before, finite, self._factors.value, self._switches.value)
        self._ring.write(before.steps, before.scale, after.scale, code)
        for variable, value in zip(self._state_variables(), after, strict=True):
            variable.assign(value)

    def _functional_step(
        self, optimizer_values: Sequence[Tensor], grads: list[Tensor | None], values: Sequence[Tensor], variables: Sequence[Any]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The step on values: `values` belong to the variables that the optimizer was built on, `grads` to `variables`, some of these."""
        built, inner, own = list(self._trainable_variables), self.inner_optimizer.variables, list(self._variables)
        mapping = [*zip(built, values, strict=True), *zip(self.variables, optimizer_values, strict=True)]

        def gather(scope: keras.StatelessScope, code: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
            return [scope.get_current_value(v) for v in built], [scope.get_current_value(v) for v in inner], code

        def take() -> tuple[list[Tensor], list[Tensor], Tensor]:
            with keras.StatelessScope(state_mapping=mapping) as scope:
                # Unscaled anew: only raw gradients then pass into the conditional, and the verdict's copy is never written to memory.
                code = self._take(self._unscale(grads, variables), variables)
            return gather(scope, code)

        def skip() -> tuple[list[Tensor], list[Tensor], Tensor]:
            with keras.StatelessScope(state_mapping=mapping) as scope:
                code = self._skip(grads)
            return gather(scope, code)

        with keras.StatelessScope(state_mapping=mapping):
            finite = self._verdict(self._unscale(grads, variables))
        new_values, new_inner, code = native.branch(finite, take, skip)
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self._finish(finite, code)
        return new_values, [scope.get_current_value(v) for v in own] + new_inner
