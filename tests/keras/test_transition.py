"""The transition in Keras operations equals polyamp.LossScale.update, bit for bit, for any configuration and any events."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from polyamp import LossScale, LossScaleState
from polyamp.presets import PRESETS
from polyamp_keras.native import compiled
from polyamp_keras.transition import ScaleTensors, advance, config_from_settings, settings_from_config

from .models import replay


@compiled
def one_step(state, finite, factors, switches):
    return tuple(advance(ScaleTensors(*state), finite, factors, switches))


def to_tensors(state: LossScaleState) -> tuple:
    dtypes = ("float32", *["int32"] * 5)
    return tuple(ops.convert_to_tensor(np.asarray(value, dtype)) for value, dtype in zip(astuple(state), dtypes, strict=True))


def run(config: LossScale, events: list[bool], start: LossScaleState | None = None) -> list[LossScaleState]:
    factors, switches = settings_from_config(config)
    factors, switches = ops.convert_to_tensor(np.asarray(factors, "float32")), ops.convert_to_tensor(np.asarray(switches, "int32"))
    state = to_tensors(start or config.init())
    states = []
    for finite in events:
        state = one_step(state, ops.convert_to_tensor(finite), factors, switches)
        states.append(LossScaleState(*(ops.convert_to_numpy(value).item() for value in state)))
    return states


@st.composite
def configurations(draw: st.DrawFn) -> LossScale:
    if draw(st.booleans()):
        return LossScale.static(draw(st.sampled_from([1.0, 128.0, 1000.0])))
    low, high = draw(st.integers(-30, 0)), draw(st.integers(1, 30))
    return LossScale.dynamic(
        init_scale=2.0 ** draw(st.integers(low, high)),
        growth_factor=draw(st.sampled_from([2.0, 4.0, 1.5, 1.1])),
        backoff_factor=draw(st.sampled_from([0.5, 0.25, 0.7])),
        growth_interval=draw(st.integers(1, 4)),
        hysteresis=draw(st.integers(1, 3)),
        hysteresis_refill=draw(st.sampled_from(["finite", "growth"])),
        min_scale=2.0**low,
        max_scale=2.0**high,
    )


@settings(max_examples=60, deadline=None)
@given(configurations(), st.lists(st.booleans(), max_size=25))
def test_equals_the_reference(config: LossScale, events: list[bool]) -> None:
    assert run(config, events) == replay(config, events)[1:]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets(name: str) -> None:
    config = LossScale.like(name, growth_interval=3)
    events = [mark == "." for mark in "..X...XX....XXX......"]
    assert run(config, events) == replay(config, events)[1:]


def test_scripted_table() -> None:
    states = run(LossScale.dynamic(init_scale=8, growth_interval=3), [mark == "." for mark in "..X...XX..."])
    assert [state.scale for state in states] == [8, 8, 4, 4, 4, 8, 4, 2, 2, 2, 4]


def test_floor_holds_after_170_overflows() -> None:
    config = LossScale.dynamic()
    state = run(config, [False] * 170)[-1]
    assert (state.scale, state.skipped, state.consecutive_skips) == (2.0**-24, 170, 170)


def test_ceiling_refuses_growth_and_restarts_the_count() -> None:
    config = LossScale.dynamic(init_scale=2.0**63, growth_interval=1, max_scale=2.0**64)
    assert [(state.scale, state.good_steps) for state in run(config, [True] * 3)] == [(2.0**64, 0)] * 3


def test_a_product_that_overflows_float32_is_refused() -> None:
    config = LossScale.dynamic(init_scale=2.0**100, growth_factor=2.0**100, growth_interval=1, max_scale=2.0**100)
    assert run(config, [True])[0].scale == 2.0**100


def test_a_restored_counter_beyond_the_interval_grows() -> None:
    config = LossScale.dynamic(init_scale=8, growth_interval=3)
    assert run(config, [True], LossScaleState(scale=8.0, good_steps=50))[0].scale == 16


def test_good_steps_saturate_instead_of_wrapping() -> None:
    start = LossScaleState(scale=8.0, good_steps=2**31 - 1)
    assert run(LossScale.static(8), [True], start)[0].good_steps == 2**31 - 1


@settings(max_examples=50, deadline=None)
@given(configurations(), configurations())
def test_settings_round_trip(config: LossScale, other: LossScale) -> None:
    factors, switches = settings_from_config(config)
    stored = np.asarray(factors, "float32").tolist()
    assert config_from_settings(stored, switches, current=config) == config
    elsewhere = config_from_settings(stored, switches, current=other)
    events = [True, False, True, True, False, False, True]
    assert replay(elsewhere, events) == replay(config, events)
