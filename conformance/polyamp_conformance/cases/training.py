"""Training family: the digits workloads in the ways in which a match can be claimed.

Rules (docs/spec.md, section 9.4)
- `digits-exact`: free run of the dyadic workload; scale, skips, master bits and momentum bits of every step. `tiny` multiplies the loss by
  2^-26 and starts from 2^44, which catches unscaling in 16 bits.
- `replay`: `digits-mlp`, each step from the reference's state.
- `injection`: `digits-mlp` from a low scale with inf, -inf, NaN and 2^40 on the loss and in each gradient leaf; events in closed form.
- `free-run`: `digits-mlp` as a user would run it, and the same in float32; its accuracy on held-out rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from polyamp.loss_scale import LossScale
from polyamp.trace import StepRecord
from polyamp_conformance import judge
from polyamp_conformance.cases.base import Case, Context, Needs, Observation
from polyamp_conformance.cases.digest import digest, moved, slots_digest
from polyamp_conformance.cases.errors import step_errors
from polyamp_conformance.cases.reference import Reference, write_reference
from polyamp_conformance.data import stream
from polyamp_conformance.oracle.network import gradients, probe
from polyamp_conformance.workloads import Workload, digits_exact, digits_mlp

__all__ = ["EXACT_SEEDS", "training_cases"]

EXACT_SEEDS = 6
_INJECTION_STREAM = 55
_INJECTION_STEPS = 200


def training_cases(seed: int) -> list[Case]:
    """All training cases of one base seed; the exact workload takes `EXACT_SEEDS` seeds from it on."""
    seeds = range(seed, seed + EXACT_SEEDS)
    cases = [_exact_case(f"training/digits-exact/seed-{s}", partial(digits_exact, s), s, every_execution=s == seed) for s in seeds]
    tiny = partial(digits_exact, seed, init_scale=2.0**44)
    cases.append(_exact_case(f"training/digits-exact/tiny-{seed}", tiny, seed, loss_factor=2.0**-26))
    for optimizer in ("sgd", "adamw"):
        cases += [_replay_case(optimizer, seed), _injection_case(optimizer, seed), _free_run_case(optimizer, seed)]
    return cases


Build = Callable[[], Workload]
"""Builds a workload; cached, and called only in a worker, so that listing cases loads no data."""


def _needs(loss: str, optimizer: str, *formats: str) -> Needs:
    return Needs(formats=formats or ("float16",), layers=("dense",), losses=(loss,), optimizers=(optimizer,))


def _header(build: Build, seed: int) -> dict[str, Any]:
    task = build().task
    return {"workload": task.workload, "policy": str(task.policy), "loss_scale": str(task.loss_scale), "optimizer": task.optimizer.name, "seed": seed}


def _exact_case(name: str, build: Build, seed: int, *, loss_factor: float = 1.0, every_execution: bool = False) -> Case:
    def observe(context: Context) -> Observation:
        workload = build()
        task = workload.task
        trainer = context.backend.trainer(task, context.device, context.execution)
        bits = 0.0
        for number, (x, y) in enumerate(zip(workload.inputs, workload.targets, strict=True)):
            if context.is_oracle:
                state = trainer.snapshot()
                factor = float(state.loss_scale["scale"]) * loss_factor
                bits = max(bits, gradients(task, state.parameters, x, y, factor, certify=True).recorder.bits or 0.0)
            outcome = trainer.step(x, y, loss_factor)
            after = trainer.snapshot()
            yield StepRecord(
                step=number,
                scale=outcome.scale,
                scale_after=outcome.scale_after,
                skipped=outcome.skipped,
                loss=outcome.loss,
                digest=digest(after.parameters, task.parameters),
                values={"slots_digest": slots_digest(after.slots, task.parameters), "optimizer_steps": float(after.optimizer_steps)},
            )
        totals: dict[str, Any] = {"accuracy": workload.accuracy(trainer.predict(workload.held_out_inputs))}
        return totals | ({"certified_bits": bits} if context.is_oracle else {})

    return Case(
        name=name,
        spec=("3.2", "4.1", "4.2", "9.4.2"),
        title="every step bit-identical to the oracle: scale, skips, float32 masters, momentum"
        + (" (loss x 2^-26: unscaling has to be in float32)" if loss_factor != 1 else ""),
        observe=observe,
        judge=judge.exact,
        needs=_needs("mse", "sgd"),
        every_execution=every_execution,
        plotted=loss_factor == 1,
        header=partial(_header, build, seed),
    )


def _reference_path(folder: Path, optimizer: str, seed: int) -> Path:
    return folder / f"digits-mlp-{optimizer}-{seed}.npz"


def _replay_case(optimizer: str, seed: int) -> Case:
    build = partial(digits_mlp, seed, optimizer)

    def observe(context: Context) -> Observation:
        workload = build()
        task = workload.task
        reference = Reference.read(_reference_path(context.references, optimizer, seed))
        trainer = context.backend.trainer(task, context.device, context.execution)
        for number, (x, y) in enumerate(zip(workload.inputs, workload.targets, strict=True)):
            start, expected = reference.snapshots[number : number + 2]
            trainer.restore(start)
            # Slots may be stored in another form: what a skip leaves alone is what the trainer itself restored, not the file's last bit.
            own = trainer.snapshot() if float(expected.loss_scale["skipped"]) > float(start.loss_scale["skipped"]) else start
            outcome = trainer.step(x, y)
            after = trainer.snapshot()
            yield StepRecord(
                step=number,
                scale=outcome.scale,
                scale_after=outcome.scale_after,
                skipped=outcome.skipped,
                loss=outcome.loss,
                values={
                    "good_steps": float(after.loss_scale["good_steps"]),
                    "optimizer_steps": float(after.optimizer_steps),
                    "headroom": float(reference.headroom[number]),
                    "ambiguous": float(reference.ambiguous[number]),
                    **step_errors(task.optimizer, own, after, expected, skipped=outcome.skipped),
                },
            )
        return {"masked_inf": reference.masked_inf} if context.is_oracle else None

    return Case(
        name=f"training/digits-mlp-{optimizer}/replay",
        spec=("3.2", "4.1", "4.2", "9.4.4"),
        title="each single step from the oracle's state: decision, counters, update",
        observe=observe,
        judge=judge.replay,
        needs=_needs("softmax_cross_entropy", optimizer),
        plotted=True,
        prepare=lambda folder: write_reference(build(), _reference_path(folder, optimizer, seed)),
        header=partial(_header, build, seed),
    )


def _injection_case(optimizer: str, seed: int) -> Case:
    loss_scale = LossScale.dynamic(init_scale=2.0**4, growth_interval=5)
    build = partial(digits_mlp, seed, optimizer, steps=_INJECTION_STEPS, loss_scale=loss_scale)

    def observe(context: Context) -> Observation:
        workload = build()
        task = workload.task
        schedule = _injections(seed, list(task.parameters))
        trainer = context.backend.trainer(task, context.device, context.execution)
        for number, (x, y) in enumerate(zip(workload.inputs, workload.targets, strict=True)):
            if number not in schedule:
                outcome = trainer.step(x, y)
                yield StepRecord(step=number, scale=outcome.scale, scale_after=outcome.scale_after, skipped=outcome.skipped, loss=outcome.loss)
                continue
            before = trainer.snapshot()
            leaf, value = schedule[number]
            if leaf is None:
                outcome = trainer.step(x, y, value)
            else:
                poisoned = {name: np.ones_like(w) for name, w in before.parameters.items()}
                poisoned[leaf].flat[-1] = value
                outcome = trainer.apply(poisoned)
            after = trainer.snapshot()
            values = {"moved": moved(before, after), "optimizer_steps": float(after.optimizer_steps)}
            yield StepRecord(
                step=number, scale=outcome.scale, scale_after=outcome.scale_after, skipped=outcome.skipped, reason="injected", values=values
            )
        return None

    return Case(
        name=f"training/digits-mlp-{optimizer}/injection",
        spec=("3.2", "4.2", "4.3", "9.4.3"),
        title="inf, -inf, NaN and 2^40 on the loss and in each gradient: every one skipped, nothing moved, nothing else skipped",
        observe=observe,
        judge=judge.exact,
        needs=_needs("softmax_cross_entropy", optimizer),
        plotted=True,
        header=partial(_header, build, seed),
    )


def _injections(seed: int, leaves: list[str]) -> Mapping[int, tuple[str | None, float]]:
    """Steps that are injected: (None, loss factor) or (gradient leaf, value); each leaf and each kind occurs."""
    kinds: list[tuple[str | None, float]] = [(None, v) for v in (np.inf, -np.inf, np.nan, 2.0**40)]
    kinds += [(leaf, v) for leaf, v in zip(leaves, (np.inf, -np.inf, np.nan) * len(leaves), strict=False)]
    rng = stream(seed, _INJECTION_STREAM)
    steps = np.sort(rng.choice(_INJECTION_STEPS, size=2 * len(kinds), replace=False))
    order = np.concatenate([rng.permutation(len(kinds)) for _ in range(2)])
    return {int(step): kinds[int(kind)] for step, kind in zip(steps, order, strict=True)}


def _free_run_case(optimizer: str, seed: int) -> Case:
    build = partial(digits_mlp, seed, optimizer)

    def observe(context: Context) -> Observation:
        workload = build()
        task = workload.task
        trainer = context.backend.trainer(task, context.device, context.execution)
        for number, (x, y) in enumerate(zip(workload.inputs, workload.targets, strict=True)):
            values = {}
            if context.is_oracle:
                state = trainer.snapshot()
                about = probe(task, state.parameters, x, y, float(state.loss_scale["scale"]))
                values = {"headroom": about.headroom, "ambiguous": float(about.ambiguous)}
            outcome = trainer.step(x, y)
            yield StepRecord(
                step=number, scale=outcome.scale, scale_after=outcome.scale_after, skipped=outcome.skipped, loss=outcome.loss, values=values
            )
        accuracy = workload.accuracy(trainer.predict(workload.held_out_inputs))
        baseline = digits_mlp(seed, optimizer, policy="float32", loss_scale=LossScale.none())
        reference = context.backend.trainer(baseline.task, context.device, context.execution)
        for x, y in zip(baseline.inputs, baseline.targets, strict=True):
            reference.step(x, y)
        return {"accuracy": accuracy, "accuracy_float32": baseline.accuracy(reference.predict(baseline.held_out_inputs))}

    return Case(
        name=f"training/digits-mlp-{optimizer}/free-run",
        spec=("3.2", "4.1", "9.4.5"),
        title="an ordinary float16 training run: first 25 steps as the oracle's, accuracy above 95 % and within half a point of float32",
        observe=observe,
        judge=judge.free_run,
        needs=_needs("softmax_cross_entropy", optimizer, "float16", "float32"),
        plotted=True,
        header=partial(_header, build, seed),
    )
