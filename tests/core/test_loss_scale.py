"""Loss scale: configuration and transition (docs/spec.md, sections 3.1 to 3.4)."""

from __future__ import annotations

import math
import struct
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import LossScale, LossScaleError, LossScaleStalled, LossScaleState
from polyamp.scale_range import float32

from .trajectories import EVENTS, run, scales


@st.composite
def configs(draw: st.DrawFn, powers_of_two: bool = False) -> LossScale:
    low, start, high = sorted(draw(st.lists(st.integers(-99, 99), min_size=3, max_size=3)))
    factor = st.sampled_from([2.0, 4.0]) if powers_of_two else st.floats(1.001, 16)
    shift = 1.0 if powers_of_two else draw(st.floats(1.0, 1.9))
    return LossScale.dynamic(
        init_scale=2.0**start,
        growth_factor=draw(factor),
        backoff_factor=1 / draw(factor),
        growth_interval=draw(st.integers(1, 5)),
        hysteresis=draw(st.integers(1, 3)),
        hysteresis_refill=draw(st.sampled_from(["finite", "growth"])),
        min_scale=2.0**low / shift,
        max_scale=2.0**high * shift,
    )


flags = st.lists(st.booleans(), max_size=60).map(lambda finite: "".join(".X"[not f] for f in finite))


def test_trajectory_of_a_plain_run() -> None:
    states = run(LossScale.dynamic(init_scale=8, growth_interval=3), EVENTS)
    assert [s.scale for s in states] == [8, 8, 4, 4, 4, 8, 4, 2, 2, 2, 4]
    assert [s.good_steps for s in states] == [1, 2, 0, 1, 2, 0, 0, 0, 1, 2, 0]
    assert [s.consecutive_skips for s in states] == [0, 0, 1, 0, 0, 0, 1, 2, 0, 0, 0]
    assert [s.skipped for s in states] == [0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 3]
    assert [s.steps for s in states] == list(range(1, 12))


def test_growth_happens_on_exactly_the_last_step_of_the_interval() -> None:
    assert scales(LossScale.dynamic(init_scale=1, growth_interval=4), "." * 9) == [1, 1, 1, 2, 2, 2, 2, 4, 4]
    assert scales(LossScale.dynamic(init_scale=1, growth_interval=1), "...") == [2, 4, 8]


def test_an_overflow_on_the_last_step_of_the_interval_starts_it_anew() -> None:
    assert scales(LossScale.dynamic(init_scale=8, growth_interval=3), "..X..X...") == [8, 8, 4, 4, 4, 2, 2, 2, 4]


def test_floor() -> None:
    config = LossScale.dynamic(init_scale=4, min_scale=1, growth_interval=2)
    assert scales(config, "XXXX..") == [2, 1, 1, 1, 1, 2]
    assert scales(LossScale.dynamic(init_scale=4, backoff_factor=0.25, min_scale=3), "XX") == [3, 3]


def test_166_overflows_never_reach_zero() -> None:
    states = run(LossScale.dynamic(), "X" * 166)
    assert states[39].scale == 2.0**-24
    assert all(s.scale == 2.0**-24 for s in states[39:])
    assert states[38].scale == 2.0**-23
    assert states[-1].consecutive_skips == 166


def test_the_ceiling_refuses_growth_and_still_resets_the_counter() -> None:
    states = run(LossScale.dynamic(init_scale=4, max_scale=8, growth_interval=2), "......")
    assert [s.scale for s in states] == [4, 8, 8, 8, 8, 8]
    assert [s.good_steps for s in states] == [1, 0, 1, 0, 1, 0]


def test_the_ceiling_refuses_growth_that_would_pass_it_instead_of_clamping() -> None:
    assert scales(LossScale.dynamic(init_scale=4, max_scale=7, growth_interval=1), "..") == [4, 4]


def test_refused_growth_still_refills_the_hysteresis() -> None:
    config = LossScale.dynamic(init_scale=8, max_scale=8, growth_interval=2, hysteresis=2, hysteresis_refill="growth")
    assert [s.hysteresis_left for s in run(config, "X..")] == [1, 1, 2]


def test_hysteresis_refilled_by_every_finite_step() -> None:
    states = run(LossScale.dynamic(init_scale=8, growth_interval=100, hysteresis=2), "X.XXX.XX")
    assert [s.scale for s in states] == [8, 8, 8, 4, 2, 2, 2, 1]
    assert [s.hysteresis_left for s in states] == [1, 2, 1, 1, 1, 2, 1, 1]


def test_hysteresis_refilled_by_growth_only() -> None:
    states = run(LossScale.dynamic(init_scale=8, growth_interval=3, hysteresis=2, hysteresis_refill="growth"), "X.X...XX")
    assert [s.scale for s in states] == [8, 8, 4, 4, 4, 8, 8, 4]
    assert [s.hysteresis_left for s in states] == [1, 1, 1, 1, 1, 2, 1, 1]


def test_a_step_that_hysteresis_spares_is_a_skipped_step_all_the_same() -> None:
    (state,) = run(LossScale.dynamic(init_scale=8, hysteresis=3), "X", LossScaleState(scale=8.0, good_steps=7, hysteresis_left=3))
    assert state == LossScaleState(scale=8.0, good_steps=0, hysteresis_left=2, skipped=1, consecutive_skips=1, steps=1)


def test_a_lowered_interval_takes_effect_at_once() -> None:
    before = run(LossScale.dynamic(init_scale=8, growth_interval=2000), "." * 10)[-1]
    assert before.good_steps == 10
    lowered = LossScale.dynamic(init_scale=8, growth_interval=5)
    assert [(s.scale, s.good_steps) for s in run(lowered, "..", before)] == [(16, 0), (16, 1)]


def test_products_are_rounded_to_float32_once_with_float32_factors() -> None:
    grown = LossScale.dynamic(init_scale=1, growth_factor=1.3, growth_interval=1)
    assert scales(grown, "...") == [1.2999999523162842, 1.6899998188018799, 2.1969997882843018]  # a float64 factor: 1.6899999380111694
    backed_off = LossScale.dynamic(init_scale=1000, backoff_factor=0.3)
    assert scales(backed_off, "XXX") == [300.0, 90.0, 27.000001907348633]  # a float64 factor: 27.0


def test_the_initial_scale_is_rounded_to_float32() -> None:
    assert LossScale.dynamic(init_scale=0.1).init().scale == 0.10000000149011612


def test_static_scaling_checks_and_counts_and_never_moves() -> None:
    states = run(LossScale.static(1024), "." * 5 + "XX" + ".")
    assert {s.scale for s in states} == {1024.0}
    assert states[-1] == LossScaleState(scale=1024.0, good_steps=1, hysteresis_left=1, skipped=2, consecutive_skips=0, steps=8)


def test_none_is_static_scaling_by_one() -> None:
    states = run(LossScale.none(check=True), ".X.")
    assert [s.scale for s in states] == [1, 1, 1]
    assert states[-1].skipped == 1
    assert LossScale.none().check is False
    assert LossScale.none(check=True).check is True
    assert LossScale.static(2).check is True


def test_defaults_of_dynamic() -> None:
    c = LossScale.dynamic()
    assert (c.kind, c.init_scale, c.growth_factor, c.backoff_factor, c.growth_interval) == ("dynamic", 65536.0, 2.0, 0.5, 2000)
    assert (c.hysteresis, c.hysteresis_refill, c.min_scale, c.max_scale, c.max_consecutive_skips, c.check) == (
        *(1, "finite", 2.0**-24, 2.0**64, 100),
        True,
    )
    assert c.init() == LossScaleState(scale=65536.0)


def test_configuration_and_state_are_immutable_and_hashable() -> None:
    config = LossScale.dynamic(init_scale=8)
    state = config.init()
    with pytest.raises(FrozenInstanceError):
        config.init_scale = 4  # type: ignore[misc]
    with pytest.raises((FrozenInstanceError, AttributeError)):
        state.scale = 4  # type: ignore[misc]
    config.update(state, False)
    assert state == LossScaleState(scale=8.0)
    assert hash(config) == hash(LossScale.dynamic(init_scale=8.0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"init_scale": 0.0}, ["init_scale=0.0"]),
        ({"init_scale": -1.0}, ["init_scale=-1.0"]),
        ({"init_scale": math.inf}, ["init_scale=inf", "finite"]),
        ({"init_scale": math.nan}, ["init_scale=nan", "finite"]),
        ({"init_scale": True}, ["init_scale=True"]),
        ({"init_scale": "65536"}, ["init_scale='65536'"]),
        ({"init_scale": 10**400}, ["init_scale=1000", "finite"]),
        ({"init_scale": 2.0**65}, ["max_scale=1.84467e+19"]),
        ({"init_scale": 2.0**-25}, ["min_scale=5.96046e-08"]),
        ({"min_scale": 2.0**-101}, ["2^-100"]),
        ({"min_scale": 0.0}, ["2^-100"]),
        ({"max_scale": 2.0**101}, ["2^100"]),
        ({"min_scale": 8.0, "max_scale": 4.0, "init_scale": 4.0}, ["min_scale=8.0", "max_scale=4.0"]),
        ({"growth_factor": 1.0}, ["growth_factor=1.0", "> 1"]),
        ({"growth_factor": 1 + 2.0**-30}, ["growth_factor", "float32"]),
        ({"growth_factor": 1e39}, ["growth_factor=1e+39", "finite"]),
        ({"growth_factor": 0.5}, ["growth_factor=0.5"]),
        ({"backoff_factor": 1.0}, ["backoff_factor=1.0", "(0, 1)"]),
        ({"backoff_factor": 0.0}, ["backoff_factor=0.0"]),
        ({"backoff_factor": 1e-46}, ["backoff_factor", "float32"]),
        ({"backoff_factor": 1e-40}, ["backoff_factor=1e-40", "normal float32"]),
        ({"backoff_factor": 2.0}, ["backoff_factor=2.0"]),
        ({"growth_interval": 0}, ["growth_interval=0", ">= 1"]),
        ({"growth_interval": 2.0}, ["growth_interval=2.0", "integer"]),
        ({"growth_interval": True}, ["growth_interval=True"]),
        ({"growth_interval": 2**31}, ["growth_interval", "int32"]),
        ({"hysteresis": 0}, ["hysteresis=0"]),
        ({"hysteresis_refill": "never"}, ["hysteresis_refill='never'", "'finite'", "'growth'"]),
        ({"max_consecutive_skips": 0}, ["max_consecutive_skips=0"]),
    ],
)
def test_values_out_of_range_are_errors_that_name_the_field(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(LossScaleError) as caught:
        LossScale.dynamic(**changes)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"min_scale": 2.0**-100, "init_scale": 2.0**-100},
        {"max_scale": 2.0**100, "init_scale": 2.0**100},
        {"growth_interval": 2**31 - 1},
        {"max_consecutive_skips": None},
        {"init_scale": 0.7, "min_scale": 0.7, "max_scale": 0.7},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(changes: dict[str, Any]) -> None:
    config = LossScale.dynamic(**changes)
    assert config.check_scale(config.init().scale) == config.init().scale


@pytest.mark.parametrize("scale", [0, -8.0, math.inf, math.nan, pytest.param(10**400, id="huge"), 2.0**65, 2.0**-25, "8", True, None])
def test_a_scale_set_by_hand_is_validated(scale: Any) -> None:
    with pytest.raises(LossScaleError, match="scale="):
        LossScale.dynamic().check_scale(scale)


def test_other_kinds_are_validated_too() -> None:
    with pytest.raises(LossScaleError, match="kind='dynamical'"):
        LossScale(kind="dynamical", init_scale=8.0)  # type: ignore[arg-type]
    with pytest.raises(LossScaleError, match="check=False"):
        LossScale(kind="static", init_scale=8.0, check=False)
    with pytest.raises(LossScaleError, match="none"):
        LossScale(kind="none", init_scale=8.0)
    with pytest.raises(LossScaleError, match="static"):
        LossScale.none().check_scale(2.0)
    with pytest.raises(LossScaleError, match="scale=0"):
        LossScale.static(0)


def test_integers_become_floats_so_that_equal_configurations_print_alike() -> None:
    assert repr(LossScale.dynamic(init_scale=8, growth_factor=2)) == repr(LossScale.dynamic(init_scale=8.0, growth_factor=2.0))


def test_stall_after_the_given_number_of_skips_in_a_row() -> None:
    config = LossScale.dynamic(max_consecutive_skips=3)
    assert [config.is_stalled(s) for s in run(config, "XX.XXXX.")] == [False, False, False, False, False, True, True, False]
    never = LossScale.dynamic(max_consecutive_skips=None)
    assert not never.is_stalled(run(never, "X" * 200)[-1])


def test_the_stall_error_names_culprits_and_a_forward_overflow() -> None:
    config = LossScale.dynamic(max_consecutive_skips=7)
    error = config.stalled_error(7, 2.0**-24, culprits=tuple(f"layer{i}.weight" for i in range(10)), loss_finite=False)
    assert isinstance(error, LossScaleStalled)
    assert all(word in str(error) for word in ("7 steps", "max_consecutive_skips=7", "5.96046e-08", "layer0.weight", "layer7.weight", "forward"))
    assert "layer8.weight" not in str(error)
    assert "forward" not in str(config.stalled_error(7, 1.0, loss_finite=True))


def test_text() -> None:
    assert str(LossScale.dynamic()) == "dynamic()"
    assert str(LossScale.dynamic(init_scale=8, hysteresis=2)) == "dynamic(init_scale=8.0, hysteresis=2)"
    assert str(LossScale.static(1024)) == "static(1024)"
    assert str(LossScale.none()) == "none"
    assert str(LossScale.none(check=True)) == "none(check=True)"


@given(st.floats())
def test_float32_is_the_nearest_one(value: float) -> None:
    rounded = float32(value)
    if math.isnan(value):
        assert math.isnan(rounded)
    elif math.isfinite(rounded):
        (bits,) = struct.unpack("<I", struct.pack("<f", rounded))
        assert struct.unpack("<f", struct.pack("<I", bits))[0] == rounded
        neighbours = [struct.unpack("<f", struct.pack("<I", bits + step))[0] for step in (-1, 1) if 0 <= bits + step < 2**32]
        assert all(abs(value - rounded) <= abs(value - other) for other in neighbours if math.isfinite(other))
    else:
        assert abs(value) >= (2 - 2.0**-24) * 2.0**127
        assert rounded == math.copysign(math.inf, value)


@given(configs(), flags)
def test_invariants_of_every_step(config: LossScale, events: str) -> None:
    before = config.init()
    low, high = float32(config.min_scale), float32(config.max_scale)
    for number, (event, after) in enumerate(zip(events, run(config, events), strict=True), 1):
        assert low <= after.scale <= high
        assert float32(after.scale) == after.scale
        assert config.check_scale(after.scale) == after.scale
        assert 0 <= after.good_steps < config.growth_interval
        assert 1 <= after.hysteresis_left <= config.hysteresis
        assert after.steps == number
        assert after.skipped == events[:number].count("X")
        assert after.consecutive_skips == number - len(events[:number].rstrip("X"))
        assert after.scale >= before.scale if event == "." else after.scale <= before.scale
        assert event == "." or after.good_steps == 0
        before = after


@given(configs(powers_of_two=True), flags)
def test_powers_of_two_stay_powers_of_two(config: LossScale, events: str) -> None:
    assert {math.frexp(s.scale)[0] for s in run(config, events)} <= {0.5}


@given(configs(powers_of_two=True), st.integers(0, 60))
def test_closed_form_of_finite_steps(config: LossScale, steps: int) -> None:
    scale = config.init_scale
    for _ in range(steps // config.growth_interval):
        scale = scale * config.growth_factor if scale * config.growth_factor <= config.max_scale else scale
    assert [s.scale for s in run(config, "." * steps)][-1:] == [scale] * bool(steps)


@given(configs(powers_of_two=True), st.integers(1, 60))
def test_closed_form_of_overflows(config: LossScale, steps: int) -> None:
    drops = max(steps - config.hysteresis + 1, 0)
    expected = max(config.init_scale * config.backoff_factor**drops, config.min_scale)
    assert run(config, "X" * steps)[-1].scale == expected


@given(configs(), flags, st.integers(0, 60))
def test_a_run_continues_from_any_state(config: LossScale, events: str, cut: int) -> None:
    whole = run(config, events)
    first = run(config, events[:cut])
    assert first + run(config, events[cut:], first[-1] if first else None) == whole
