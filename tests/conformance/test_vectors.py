"""Scripts are data: they follow their schema, and the core's own transition follows them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files

import jsonschema
import pytest

from polyamp_conformance import vectors
from polyamp_conformance.vectors import Script, loss_scale_scripts


@pytest.mark.parametrize("script", loss_scale_scripts(), ids=lambda s: s.name)
def test_the_core_follows_every_script(script: Script) -> None:
    config, state = script.loss_scale, script.loss_scale.init()
    for number in range(len(script.finite) + 1):
        config = replace(config, **script.edits.get(number, {}))
        for field, run in script.expected.items():
            assert getattr(state, field) == run[number], (number, field)
        if number < len(script.finite):
            state = config.update(state, script.finite[number])


@pytest.mark.parametrize(
    "damage",
    [{"events": "..Y"}, {"scales": []}, {"spec": ["three"]}, {"unknown": 1}, {"name": "Has Spaces"}, {"actions": [{"after": 1}]}],
    ids=lambda d: next(iter(d)),
)
def test_the_schema_refuses_damage(damage: dict[str, object]) -> None:
    folder = files(vectors)
    schema = json.loads(folder.joinpath("schema.json").read_text("utf-8"))
    document = json.loads(folder.joinpath("loss_scale.json").read_text("utf-8"))
    jsonschema.validate(document, schema)
    document["cases"][0] |= damage
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


def test_runs_have_one_value_more_than_events() -> None:
    case = {"name": "short", "spec": ["3.2"], "title": "too short", "loss_scale": {"make": "dynamic"}, "events": "..", "scales": [65536, 65536]}
    with pytest.raises(ValueError, match="scale has 2 values for 2 events"):
        vectors._script(case)
