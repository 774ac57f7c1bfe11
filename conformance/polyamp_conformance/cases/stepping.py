"""Step family: steps whose scaled gradients are given, so that nothing but the transaction is under test.

The network is tiny and everything is dyadic: weights, slots and counters must agree with the oracle bit for bit (AdamW: the step count and
that nothing moved on a skip; its arithmetic is judged in replay).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from polyamp.backend import Snapshot
from polyamp.loss_scale import LossScale
from polyamp.policy import Policy
from polyamp.task import Dense, OptimizerSpec, TrainingTask
from polyamp.trace import StepRecord
from polyamp_conformance import judge
from polyamp_conformance.cases.base import Case, Context, Needs, Observation
from polyamp_conformance.cases.digest import digest, moved, slots_digest
from polyamp_conformance.data import Array

__all__ = ["stepping_cases"]

_SGD = OptimizerSpec("sgd", {"learning_rate": 0.25, "momentum": 0.5})
_ADAMW = OptimizerSpec("adamw", {"learning_rate": 0.125, "beta1": 0.5, "beta2": 0.75, "epsilon": 1e-16, "weight_decay": 0.125})
_SHAPES = {"w1": (2, 4), "b1": (4,), "w2": (4, 2), "b2": (2,)}
_BAD = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}


def _task(optimizer: OptimizerSpec, loss_scale: LossScale) -> TrainingTask:
    parameters = {name: (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) - 2) / 4 for name, shape in _SHAPES.items()}
    return TrainingTask(
        workload="given-gradients",
        layers=(Dense("w1", "b1", "relu"), Dense("w2", "b2")),
        loss="mse",
        parameters=parameters,
        optimizer=optimizer,
        policy=Policy("mixed_float16"),
        loss_scale=loss_scale,
        batch_size=2,
    )


def _gradients(step: int, scale: float) -> dict[str, Array]:
    """Dyadic gradients that differ by tensor and step, times the scale."""
    base = {name: np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape) for name, shape in _SHAPES.items()}
    return {name: (g * (step % 3 + 1) / 8 * np.float32(scale)).astype(np.float32) for name, g in base.items()}


def _poisoned(step: int, scale: float, leaf: str, value: float) -> dict[str, Array]:
    gradients = _gradients(step, scale)
    gradients[leaf].flat[-1] = value
    return gradients


def _filled(value: float) -> dict[str, Array]:
    return {name: np.full(shape, value, np.float32) for name, shape in _SHAPES.items()}


def stepping_cases() -> list[Case]:
    scale = 2.0**10
    dynamic = LossScale.dynamic(init_scale=scale, growth_interval=100)
    transaction = [
        _gradients(0, scale),
        _gradients(1, scale),
        _poisoned(2, scale, "w2", np.inf),
        _gradients(3, scale / 2),
        _poisoned(4, scale / 2, "b2", np.nan),
        _poisoned(5, scale / 4, "w1", -np.inf),
        _gradients(6, scale / 8),
    ]
    growth = LossScale.dynamic(init_scale=4.0, growth_interval=2)
    grown = [_gradients(step, s) for step, s in enumerate((4.0, 4.0, 8.0, 8.0, 16.0, 16.0, 32.0))]
    cases = [
        _case("transaction-sgd", ("4.2", "4.3"), "a skipped step moves neither weights nor momentum", _SGD, dynamic, transaction),
        _case("transaction-adamw", ("4.2", "4.3"), "a skipped step moves neither weights, moments nor the step count", _ADAMW, dynamic, transaction),
        _case("unscale-before-growth", ("4.1",), "a step that grows the scale unscales by the scale its gradients carry", _SGD, growth, grown),
        _case(
            "unscaled-overflow", ("4.2",), "below scale 1 a finite scaled gradient can unscale to infinity, and is skipped",
            _SGD, LossScale.dynamic(init_scale=2.0**-10, growth_interval=100), [_gradients(0, 2.0**-10), _filled(2.0**120), _gradients(2, 2.0**-11)],
        ),
        _case(
            "large-finite", ("4.2",), "large finite float32 gradients are no false alarm, although their sum overflows",
            _SGD, LossScale.static(2.0**60), [_filled(2.0**127), _filled(-(2.0**127)), _filled(2.0**127)],
        ),
        _case("static-skips", ("3.3", "4.2"), "a static scale checks and skips", _SGD, LossScale.static(scale), [
            _gradients(0, scale), _poisoned(1, scale, "b1", np.nan), _gradients(2, scale)]),
        _case("none-checked-skips", ("3.3", "4.2"), "no scaling with the check kept on skips", _SGD, LossScale.none(check=True), [
            _gradients(0, 1.0), _poisoned(1, 1.0, "w1", np.inf), _gradients(2, 1.0)]),
    ]  # fmt: skip
    for word, value in _BAD.items():
        poisoned = itertools.chain.from_iterable(
            (_poisoned(2 * i, scale * 0.5**i, leaf, value), _gradients(2 * i + 1, scale * 0.5 ** (i + 1))) for i, leaf in enumerate(_SHAPES)
        )
        title = f"{word} in the last element of any one gradient skips the step"
        cases.append(_case(f"each-leaf-{word.replace('-', 'minus-')}", ("4.2",), title, _SGD, dynamic, poisoned))
    return cases


def _case(
    name: str, spec: tuple[str, ...], title: str, optimizer: OptimizerSpec, loss_scale: LossScale, steps: Iterable[Mapping[str, Array]]
) -> Case:
    task, script = _task(optimizer, loss_scale), tuple(steps)
    exact = optimizer.name == "sgd"

    def observe(context: Context) -> Observation:
        trainer = context.backend.trainer(task, context.device, context.execution)
        after = trainer.snapshot()
        for number, gradients in enumerate(script):
            before = after
            outcome = trainer.apply(gradients)
            after = trainer.snapshot()
            yield StepRecord(
                step=number,
                scale=outcome.scale,
                scale_after=outcome.scale_after,
                skipped=outcome.skipped,
                digest=digest(after.parameters, task.parameters) if exact else None,
                values=_values(before, after, task, exact, outcome.skipped),
            )
        return None

    return Case(
        name=f"step/{name}",
        spec=spec,
        title=title,
        observe=observe,
        judge=judge.exact,
        needs=Needs(formats=("float16",), layers=("dense",), losses=("mse",), optimizers=(optimizer.name,)),
        every_execution=True,
        header=lambda: {"loss_scale": str(loss_scale), "policy": str(task.policy), "workload": task.workload},
    )


def _values(before: Snapshot, after: Snapshot, task: TrainingTask, exact: bool, skipped: bool) -> dict[str, float]:
    values = {"optimizer_steps": float(after.optimizer_steps), "good_steps": float(after.loss_scale["good_steps"])}
    values["skipped_total"] = float(after.loss_scale["skipped"])
    if exact:
        values["slots_digest"] = slots_digest(after.slots, task.parameters)
    if skipped:
        values["moved"] = moved(before, after)
    return values
