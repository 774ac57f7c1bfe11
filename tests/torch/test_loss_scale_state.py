"""The tensor transition follows `polyamp.LossScale.update` bit for bit, eagerly and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyamp import LossScale, LossScaleState, StateError
from polyamp_torch import loss_scale_state as scale_state
from polyamp_torch.runner.compiler import compile_whole

LOADING_INDUCTOR = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:torch\.")


@st.composite
def configurations(draw):
    low = draw(st.floats(min_value=2.0**-100, max_value=2.0**60, width=32))
    high = draw(st.floats(min_value=low, max_value=2.0**100, width=32))
    kind = draw(st.sampled_from(["dynamic", "dynamic", "dynamic", "static", "none"]))
    if kind == "static":
        return LossScale.static(draw(st.floats(min_value=2.0**-100, max_value=2.0**100, width=32)))
    if kind == "none":
        return LossScale.none(check=True)
    return LossScale.dynamic(
        init_scale=draw(st.floats(min_value=low, max_value=high, width=32)),
        growth_factor=draw(st.one_of(st.sampled_from([2.0, 1.5, 1.1, 4.0]), st.floats(min_value=1.0625, max_value=1e6))),
        backoff_factor=draw(st.one_of(st.sampled_from([0.5, 0.25, 0.9, 1 / 3]), st.floats(min_value=0.0009765625, max_value=0.9990234375))),
        growth_interval=draw(st.integers(1, 5)),
        hysteresis=draw(st.integers(1, 4)),
        hysteresis_refill=draw(st.sampled_from(["finite", "growth"])),
        min_scale=low,
        max_scale=high,
    )


events = st.lists(st.booleans(), max_size=40)


def follow(config, finite_steps, transition=scale_state.update, lowered_at=None):
    """Runs reference and tensors side by side; at step `lowered_at` the growth interval becomes 1."""
    reference, state = config.init(), scale_state.place(config.init(), "cpu")
    rules = scale_state.rules(config, "cpu")
    for number, finite in enumerate(finite_steps):
        if number == lowered_at:
            config = replace(config, growth_interval=1)
            rules = scale_state.rules(config, "cpu")
        reference = config.update(reference, finite)
        state = transition(state, rules, torch.tensor(0.0 if finite else 1.0))
        assert scale_state.read(state) == reference
    return state


@given(config=configurations(), finite_steps=events, lowered_at=st.one_of(st.none(), st.integers(0, 40)))
def test_follows_the_reference(config, finite_steps, lowered_at):
    follow(config, finite_steps, lowered_at=lowered_at)


@LOADING_INDUCTOR
def test_follows_the_reference_as_one_compiled_graph():
    compiled = compile_whole(scale_state.update, "cpu")

    @settings(max_examples=50)
    @given(config=configurations(), finite_steps=events, lowered_at=st.one_of(st.none(), st.integers(0, 40)))
    def check(config, finite_steps, lowered_at):
        follow(config, finite_steps, compiled, lowered_at)

    check()


def test_one_graph_serves_all_configurations():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(scale_state.update, backend=count, fullgraph=True)
    for config in (
        LossScale.dynamic(8.0, growth_interval=2),
        LossScale.dynamic(4.0, hysteresis=3),
        LossScale.static(2.0),
        LossScale.none(check=True),
    ):
        follow(config, [True, False, True, True], compiled)
    assert len(graphs) == 1


def test_a_factor_is_rounded_to_float32_once_before_the_product():
    config = LossScale.dynamic(3.0, growth_factor=1.1, growth_interval=1)
    state = follow(config, [True])
    assert state.scale.item() == (torch.tensor(3.0) * torch.tensor(1.1)).item()
    assert state.scale.dtype is torch.float32


def test_dtypes_and_shapes_do_not_change():
    config = LossScale.dynamic(growth_interval=2, hysteresis=2)
    start = scale_state.place(config.init(), "cpu")
    end = follow(config, [True, True, False, False, True])
    for before, after in zip(start, end, strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
    assert {t.dtype for t in end[1:]} == {torch.int32}


def test_an_older_state_stays_as_it_was():
    config = LossScale.dynamic(8.0, growth_interval=1)
    start = scale_state.place(config.init(), "cpu")
    scale_state.update(start, scale_state.rules(config, "cpu"), torch.tensor(0.0))
    assert scale_state.read(start) == config.init()


@pytest.mark.parametrize("config", [LossScale.static(4.0), LossScale.dynamic(4.0, growth_interval=2**31 - 1)])
def test_the_counter_does_not_wrap(config):
    state = LossScaleState(scale=4.0, good_steps=2**31 - 1)
    after = scale_state.update(scale_state.place(state, "cpu"), scale_state.rules(config, "cpu"), torch.tensor(0.0))
    assert scale_state.read(after) == config.update(state, True)


def test_infinity_from_growth_is_refused():
    config = LossScale.dynamic(2.0**100, growth_factor=2.0**60, growth_interval=1, max_scale=2.0**100)
    assert follow(config, [True, True]).scale.item() == 2.0**100


def test_mapping_round_trip_and_refusal():
    config = LossScale.dynamic(8.0, growth_interval=3)
    state = follow(config, [True, False, True])
    loaded_config, loaded = scale_state.load_mapping(scale_state.to_mapping(config, state), LossScale.dynamic(), "cpu")
    assert loaded_config == config
    assert scale_state.read(loaded) == scale_state.read(state)
    with pytest.raises(StateError, match="version"):
        scale_state.load_mapping({"version": 99}, config, "cpu")
