"""Loss-scale family: the state machine, fed with scripted events on the backend's device and across its compile boundary.

Each record carries the state after its step. An edit of a script saves the state, takes it through JSON as a file would, changes the
named fields and loads it into fresh machinery.
"""

from __future__ import annotations

import json

from polyamp.trace import StepRecord, Trace
from polyamp_conformance import judge
from polyamp_conformance.cases.base import Case, Context, Observation
from polyamp_conformance.vectors import Script, loss_scale_scripts

__all__ = ["scripted_cases"]

_VALUES = ("good_steps", "hysteresis_left")


def scripted_cases() -> list[Case]:
    return [_case(script) for script in loss_scale_scripts()]


def _case(script: Script) -> Case:
    def observe(context: Context) -> Observation:
        driver = context.backend.scale_driver(script.loss_scale, context.device, context.execution)
        for number, finite in enumerate(script.finite):
            if number in script.edits:
                saved = {**json.loads(json.dumps(dict(driver.state_dict()))), **script.edits[number]}
                driver = context.backend.scale_driver(script.loss_scale, context.device, context.execution)
                driver.load_state_dict(saved)
            before = driver.state_dict()
            driver.update(finite)
            after = driver.state_dict()
            yield StepRecord(
                step=number,
                scale=float(before["scale"]),
                scale_after=float(after["scale"]),
                skipped=int(after["skipped"]) > int(before["skipped"]),
                values={name: float(after[name]) for name in _VALUES},
            )
        return None

    return Case(
        name=f"loss_scale/{script.name}",
        spec=script.spec,
        title=script.title,
        observe=observe,
        judge=judge.exact,
        expected=_expected(script),
        every_execution=True,
        header=lambda: {"loss_scale": str(script.loss_scale)},
    )


def _expected(script: Script) -> Trace:
    records = []
    scales = script.expected["scale"]
    for number, finite in enumerate(script.finite):
        values = {name: float(script.expected[name][number + 1]) for name in _VALUES if name in script.expected}
        records.append(StepRecord(step=number, scale=scales[number], scale_after=scales[number + 1], skipped=not finite, values=values))
    return Trace({"backend": "script"}, tuple(records))
