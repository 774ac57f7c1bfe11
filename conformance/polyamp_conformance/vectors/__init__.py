"""Scripted cases as data files: hand-written, checked against `schema.json` when they are loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from polyamp.loss_scale import LossScale

__all__ = ["Script", "loss_scale_scripts"]


@dataclass(frozen=True)
class Script:
    """A sequence of finite and non-finite steps with the state expected around them.

    Attributes:
        name: name of the case.
        spec: sections of docs/spec.md.
        title: what it shows.
        loss_scale: configuration to start from.
        finite: one flag per step.
        expected: state field -> one value before each step and one after the last.
        edits: step number -> fields of the saved state to change while saving and loading before that step.
    """

    name: str
    spec: tuple[str, ...]
    title: str
    loss_scale: LossScale
    finite: tuple[bool, ...]
    expected: Mapping[str, tuple[float, ...]]
    edits: Mapping[int, Mapping[str, Any]]


@cache
def loss_scale_scripts() -> tuple[Script, ...]:
    """All scripted loss-scale cases, in file order.

    Raises:
        jsonschema.ValidationError: the file does not follow its schema.
        ValueError: a run of expected values has another length than the events.
    """
    import jsonschema

    folder = files(__name__)
    document = json.loads(folder.joinpath("loss_scale.json").read_text("utf-8"))
    jsonschema.validate(document, json.loads(folder.joinpath("schema.json").read_text("utf-8")))
    return tuple(_script(case) for case in document["cases"])


def _script(case: Mapping[str, Any]) -> Script:
    finite = tuple(flag == "." for flag, count in re.findall(r"([.X])(?:\*(\d+))?", case["events"]) for _ in range(int(count or 1)))
    expected = {"scale": _expand(case["scales"])}
    expected |= {name: _expand(case[name]) for name in ("good_steps", "hysteresis_left") if name in case}
    for name, run in expected.items():
        if len(run) != len(finite) + 1:
            raise ValueError(f"{case['name']}: {name} has {len(run)} values for {len(finite)} events; expected one more than events")
    edits = {action["before"]: action.get("set", {}) for action in case.get("actions", ())}
    return Script(case["name"], tuple(case["spec"]), case["title"], _loss_scale(case["loss_scale"]), finite, expected, edits)


def _expand(run: Sequence[Any]) -> tuple[float, ...]:
    return tuple(value for item in run for value in ([item[0]] * item[1] if isinstance(item, list) else [item]))


def _loss_scale(fields: Mapping[str, Any]) -> LossScale:
    arguments = {k: v for k, v in fields.items() if k != "make"}
    made: LossScale = getattr(LossScale, fields["make"])(**arguments)
    return made
