"""Saboteurs: backends that are right but for one thing. The suite has to notice each of them.

Each is the oracle with one method replaced, so that nothing but the bug can be what is noticed. They are run in tests, and by hand:
`polyamp conformance run --backend tests.saboteurs:NeverSkips -o broken` shows what a failure looks like.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from polyamp.backend import Capabilities, Execution, ScaleDriver, Snapshot, Trainer
from polyamp.loss_scale import LossScale, LossScaleState
from polyamp.task import TrainingTask
from polyamp_conformance.data import Array
from polyamp_conformance.oracle.backend import OracleBackend, SpecDriver
from polyamp_conformance.oracle.trainer import OracleTrainer

Arrays = Mapping[str, Array]


class Saboteur(OracleBackend):
    """A backend whose trainer or scale driver is replaced."""

    trainer_class: type[OracleTrainer] = OracleTrainer
    driver_class: type[SpecDriver] = SpecDriver

    @property
    def name(self) -> str:  # type: ignore[override]
        return type(self).__name__

    def trainer(self, task: TrainingTask, device: str, execution: Execution) -> Trainer:
        return self.trainer_class(task)

    def scale_driver(self, loss_scale: LossScale, device: str, execution: Execution) -> ScaleDriver:
        return self.driver_class(loss_scale)


class NeverSkips(Saboteur):
    """Takes every step, whatever the gradients are."""

    class trainer_class(OracleTrainer):
        def is_finite(self, scaled: Arrays, unscaled: Arrays) -> bool:
            return True


class FirstGradientOnly(Saboteur):
    """Checks the first gradient and believes it."""

    class trainer_class(OracleTrainer):
        def is_finite(self, scaled: Arrays, unscaled: Arrays) -> bool:
            return bool(np.isfinite(next(iter(scaled.values()))).all())


class LastGradientUnchecked(Saboteur):
    """Leaves out the last gradient of the list."""

    class trainer_class(OracleTrainer):
        def is_finite(self, scaled: Arrays, unscaled: Arrays) -> bool:
            return all(np.isfinite(g).all() for g in list(scaled.values())[:-1])


class InfOnly(Saboteur):
    """Looks for infinities and lets NaN through."""

    class trainer_class(OracleTrainer):
        def is_finite(self, scaled: Arrays, unscaled: Arrays) -> bool:
            return not any(np.isinf(g).any() for g in scaled.values())


class SumCheck(Saboteur):
    """Checks the sum of each gradient: a false alarm for large finite ones."""

    class trainer_class(OracleTrainer):
        def is_finite(self, scaled: Arrays, unscaled: Arrays) -> bool:
            return all(np.isfinite(np.sum(g, dtype=np.float32)) for g in scaled.values())


class RawCheckOnly(Saboteur):
    """Checks the scaled gradients and not what they unscale to."""

    class trainer_class(OracleTrainer):
        def is_finite(self, scaled: Arrays, unscaled: Arrays) -> bool:
            return all(np.isfinite(g).all() for g in scaled.values())


class GrowsLate(Saboteur):
    """Grows one finite step too late, in training and in scripts."""

    class trainer_class(OracleTrainer):
        def transition(self, state: LossScaleState, finite: bool) -> LossScaleState:
            return replace(self.config, growth_interval=self.config.growth_interval + 1).update(state, finite)

    class driver_class(SpecDriver):
        def update(self, finite: bool) -> None:
            self.state = replace(self.config, growth_interval=self.config.growth_interval + 1).update(self.state, finite)


class EqualityGrowth(Saboteur):
    """Tests the counter with == instead of >=, and sticks when the interval is lowered."""

    class driver_class(SpecDriver):
        def update(self, finite: bool) -> None:
            overdue = self.state.good_steps + 1 > self.config.growth_interval
            config = replace(self.config, growth_interval=2**30) if overdue else self.config
            self.state = config.update(self.state, finite)


class LosesFloorOnReload(Saboteur):
    """Forgets the floor when its state is rebuilt, as a pytree does that drops a field when it is flattened."""

    class driver_class(SpecDriver):
        def load_state_dict(self, mapping: Mapping[str, object]) -> None:
            super().load_state_dict(mapping)
            if self.config.kind == "dynamic":
                self.config = replace(self.config, min_scale=2.0**-100)


class ClipsAtCeiling(Saboteur):
    """Clips growth to max_scale instead of refusing it."""

    class driver_class(SpecDriver):
        def update(self, finite: bool) -> None:
            before = self.state
            self.state = self.config.update(before, finite)
            if finite and self.config.kind == "dynamic" and before.good_steps + 1 >= self.config.growth_interval:
                self.state = replace(self.state, scale=min(before.scale * self.config.growth_factor, self.config.max_scale))


class RefillsEarly(Saboteur):
    """Refills the hysteresis on every finite step, also where only growth should."""

    class driver_class(SpecDriver):
        def update(self, finite: bool) -> None:
            self.state = replace(self.config, hysteresis_refill="finite").update(self.state, finite)


class MomentumMovesOnSkip(Saboteur):
    """Decays the optimizer's first slot on a skipped step."""

    class trainer_class(OracleTrainer):
        def skip(self, unscaled: Arrays) -> None:
            slot = "v" if self.task.optimizer.name == "sgd" else "m"
            self.slots[slot] = {k: v * np.float32(0.5) for k, v in self.slots[slot].items()}


class StepCountMovesOnSkip(Saboteur):
    """Advances Adam's step count on a skipped step."""

    class trainer_class(OracleTrainer):
        def skip(self, unscaled: Arrays) -> None:
            self.optimizer_steps += 1


class DecaysOnSkip(Saboteur):
    """Applies weight decay on a skipped step."""

    class trainer_class(OracleTrainer):
        def skip(self, unscaled: Arrays) -> None:
            self.weights = {k: w * np.float32(0.999) for k, w in self.weights.items()}


class ZeroesBadGradients(Saboteur):
    """Replaces non-finite gradients by zero and takes the step."""

    class trainer_class(OracleTrainer):
        def skip(self, unscaled: Arrays) -> None:
            self.optimizer_step({k: np.nan_to_num(g, nan=0, posinf=0, neginf=0) for k, g in unscaled.items()})


class UnscalesWithNewScale(Saboteur):
    """Updates the scale first and unscales with the new one."""

    class trainer_class(OracleTrainer):
        def unscale(self, scaled: Arrays, state: LossScaleState) -> dict[str, Array]:
            return super().unscale(scaled, self.config.update(state, True))


class UnscalesInFloat16(Saboteur):
    """Unscales in float16: small gradients vanish."""

    class trainer_class(OracleTrainer):
        def unscale(self, scaled: Arrays, state: LossScaleState) -> dict[str, Array]:
            inverse = np.float16(1 / state.scale)
            return {k: (g.astype(np.float16) * inverse).astype(np.float32) for k, g in scaled.items()}


class Float16Masters(Saboteur):
    """Keeps its weights in float16."""

    class trainer_class(OracleTrainer):
        def optimizer_step(self, unscaled: Arrays) -> None:
            super().optimizer_step(unscaled)
            self.weights = {k: w.astype(np.float16).astype(np.float32) for k, w in self.weights.items()}


class ClipsBeforeUnscaling(Saboteur):
    """Clips scaled gradients to a norm that was meant for unscaled ones."""

    class trainer_class(OracleTrainer):
        def unscale(self, scaled: Arrays, state: LossScaleState) -> dict[str, Array]:
            norm = float(np.sqrt(sum(float(np.sum(g.astype(np.float64) ** 2)) for g in scaled.values())))
            factor = np.float32(min(1.0, 10.0 / norm)) if np.isfinite(norm) and norm > 0 else np.float32(1)
            return super().unscale({k: g * factor for k, g in scaled.items()}, state)


class UpdatesPerTensorGroup(Saboteur):
    """Moves the scale once per optimizer instead of once per step: here weights and biases have one each."""

    class trainer_class(OracleTrainer):
        def transition(self, state: LossScaleState, finite: bool) -> LossScaleState:
            return self.config.update(self.config.update(state, finite), finite)


class SaturatesOverflow(Saboteur):
    """Clamps overflowing gradients to the largest float16 value, so that no overflow is ever seen."""

    class trainer_class(OracleTrainer):
        def is_finite(self, scaled: Arrays, unscaled: Arrays) -> bool:
            return not any(np.isnan(g).any() for g in scaled.values())

        def optimizer_step(self, unscaled: Arrays) -> None:
            top = np.float32(65504) / np.float32(self.state.scale)
            super().optimizer_step({k: np.clip(g, -top, top) for k, g in unscaled.items()})


class ForgetsCounterOnRestore(Saboteur):
    """Restarts the growth interval whenever its state is restored."""

    class trainer_class(OracleTrainer):
        def restore(self, snapshot: Snapshot) -> None:
            super().restore(snapshot)
            self.state = replace(self.state, good_steps=0)

    class driver_class(SpecDriver):
        def load_state_dict(self, mapping: Mapping[str, object]) -> None:
            super().load_state_dict(mapping)
            self.state = replace(self.state, good_steps=0)


class ComputesInBfloat16(Saboteur):
    """Claims float16 and computes in bfloat16, which never overflows here."""

    class trainer_class(OracleTrainer):
        def __init__(self, task: TrainingTask) -> None:
            policy = replace_compute(task, "bfloat16") if task.policy.compute_dtype == "float16" else task
            super().__init__(policy)


class ClaimsNothing(Saboteur):
    """Claims no family at all: nothing can fail, and nothing may pass."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), families=())


def replace_compute(task: TrainingTask, dtype: str) -> TrainingTask:
    policy = type(task.policy)(task.policy.param_dtype, dtype, task.policy.output_dtype, task.policy.reduce_dtype)
    return replace(task, policy=policy)


SABOTEURS: dict[str, type[Saboteur]] = {
    cls.__name__: cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, Saboteur) and cls is not Saboteur
}
