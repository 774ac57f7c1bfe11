"""Presets: trajectories of other libraries, derived by hand from their sources (docs/spec.md, section 3.5)."""

from __future__ import annotations

import pytest

from polyamp import LossScale, LossScaleError
from polyamp.presets import PRESETS

from .trajectories import EVENTS, scales

PLAIN = [8, 8, 4, 4, 4, 8, 4, 2, 2, 2, 4]
LATE = [8, 8, 4, 4, 4, 4, 2, 1, 1, 1, 1]  # flax: grows on finite step N + 1
PATIENT = [8, 8, 8, 8, 8, 16, 16, 8, 8, 8, 16]  # hysteresis 2, refilled by growth only

TRAJECTORIES = {
    **dict.fromkeys(("torch", "jmp", "keras", "tf_keras", "apex", "paddle", "mindspore"), PLAIN),
    "flax": LATE,
    **dict.fromkeys(("deepspeed", "megatron"), PATIENT),
}


@pytest.mark.parametrize("name", PRESETS)
def test_trajectory_on_the_same_events(name: str) -> None:
    assert scales(LossScale.like(name, init_scale=8, growth_interval=3), EVENTS) == TRAJECTORIES[name]


@pytest.mark.parametrize(
    ("name", "floor"),
    [
        *((name, 0.0625) for name in ("torch", "flax", "keras", "apex")),
        *((name, 1.0) for name in ("jmp", "tf_keras", "paddle", "mindspore")),
        *((name, 1.0) for name in ("deepspeed", "megatron")),
    ],
)
def test_floor_after_six_overflows_from_4(name: str, floor: float) -> None:
    assert scales(LossScale.like(name, init_scale=4), "X" * 6)[-1] == floor


@pytest.mark.parametrize(
    ("name", "init_scale", "growth_interval"),
    [
        ("torch", 2.0**16, 2000),
        ("jmp", 2.0**15, 2000),
        ("flax", 2.0**16, 2001),
        ("keras", 2.0**15, 2000),
        ("tf_keras", 2.0**15, 2000),
        ("apex", 2.0**16, 2000),
        ("deepspeed", 2.0**16, 1000),
        ("megatron", 2.0**32, 1000),
        ("paddle", 2.0**16, 2000),
        ("mindspore", 2.0**24, 2000),
    ],
)
def test_defaults(name: str, init_scale: float, growth_interval: int) -> None:
    config = LossScale.like(name)
    assert (config.kind, config.init_scale, config.growth_interval) == ("dynamic", init_scale, growth_interval)
    assert config.max_consecutive_skips is None


def test_apex_stops_at_2_to_the_24() -> None:
    assert scales(LossScale.like("apex", init_scale=2.0**23, growth_interval=1), "...") == [2.0**24] * 3


@pytest.mark.parametrize("name", ["deepspeed", "megatron"])
def test_patience_that_only_growth_refills_takes_two_overflows_and_then_one(name: str) -> None:
    assert scales(LossScale.like(name, init_scale=16), "XX.X") == [16, 8, 8, 4]


def test_an_unknown_library_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(LossScaleError) as caught:
        LossScale.like("tensorflow")
    assert all(name in str(caught.value) for name in ("tensorflow", *PRESETS))


@pytest.mark.parametrize("override", ["interval", "kind", "check"])
def test_an_unknown_override_is_an_error_that_names_it(override: str) -> None:
    with pytest.raises(LossScaleError, match=f"torch: unknown override {override};"):
        LossScale.like("torch", **{override: 3})
