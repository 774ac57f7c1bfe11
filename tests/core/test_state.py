"""State mapping: round trips, other libraries' layouts, and every way to be wrong (docs/spec.md, section 7)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import LossScale, StateError
from polyamp.state import load_state_dict, state_dict

from .trajectories import run

CONFIG = LossScale.dynamic(init_scale=8, growth_interval=3)
TORCH = {"scale": 4096.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7, "_growth_tracker": 5}
MEGATRON = {"scale": 1024.0, "growth_tracker": 2, "hysteresis_tracker": 2}
DEEPSPEED = {
    "cur_scale": 512.0,
    "cur_iter": 12,
    "last_overflow_iter": 6,
    "scale_factor": 2.0,
    "scale_window": 3,
    "cur_hysteresis": 2,
    "min_scale": 1,
    "delayed_shift": 2,
    "consecutive_hysteresis": False,
}


@given(
    st.sampled_from(
        [
            CONFIG,
            LossScale.dynamic(init_scale=0.7, min_scale=0.7, max_scale=1e5, growth_factor=1.3, backoff_factor=0.9, growth_interval=1),
            LossScale.dynamic(init_scale=4, hysteresis=3, hysteresis_refill="growth", growth_interval=2, max_consecutive_skips=None),
            LossScale.static(1024),
            LossScale.none(),
            LossScale.none(check=True),
        ]
    ),
    st.text(".X", max_size=30),
    st.text(".X", max_size=10),
)
def test_what_is_saved_resumes_through_json_as_if_nothing_had_happened(config: LossScale, before: str, after: str) -> None:
    state = [config.init(), *run(config, before)][-1]
    loaded_config, loaded = load_state_dict(json.loads(json.dumps(state_dict(config, state))), LossScale.dynamic(init_scale=2))
    assert (loaded_config, loaded) == (config, state)
    assert run(loaded_config, after, loaded) == run(config, after, state)


def test_the_layout_of_version_1() -> None:
    state = run(LossScale.dynamic(init_scale=8, hysteresis=2), ".X")[-1]
    assert state_dict(LossScale.dynamic(init_scale=8, hysteresis=2), state) == {
        "version": 1,
        "scale": 8.0,
        "good_steps": 0,
        "hysteresis_left": 1,
        "skipped": 1,
        "consecutive_skips": 1,
        "steps": 2,
        "kind": "dynamic",
        "init_scale": 8.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "hysteresis": 2,
        "hysteresis_refill": "finite",
        "min_scale": 2.0**-24,
        "max_scale": 2.0**64,
        "max_consecutive_skips": 100,
        "check": True,
    }


def test_torch_keys_beside_version_1_are_tolerated() -> None:
    mapping = {**state_dict(CONFIG, CONFIG.init()), "_growth_tracker": 0}
    assert load_state_dict(mapping, CONFIG) == (CONFIG, CONFIG.init())


def test_torch_layout() -> None:
    config, state = load_state_dict(TORCH, LossScale.dynamic(hysteresis=2, min_scale=1))
    assert (config.growth_factor, config.backoff_factor, config.growth_interval) == (4.0, 0.25, 7)
    assert (config.hysteresis, config.min_scale) == (2, 1.0)
    assert (state.scale, state.good_steps, state.hysteresis_left, state.steps) == (4096.0, 5, 2, 0)
    assert [s.scale for s in run(config, "..", state)] == [4096.0, 16384.0]


@pytest.mark.parametrize(("tracker", "left"), [(2, 2), (1, 1), (0, 1), (-3, 1), (9, 2)])
def test_megatron_layout(tracker: int, left: int) -> None:
    config, state = load_state_dict({**MEGATRON, "hysteresis_tracker": tracker}, LossScale.like("megatron"))
    assert config == LossScale.like("megatron")
    assert (state.scale, state.good_steps, state.hysteresis_left) == (1024.0, 2, left)


def test_deepspeed_layout() -> None:
    config, state = load_state_dict(DEEPSPEED, LossScale.like("deepspeed"))
    assert (config.growth_factor, config.backoff_factor, config.growth_interval) == (2.0, 0.5, 3)
    # Iterations 7 to 11 were finite: growth fell on the third of them, and one more brings the next.
    assert (state.scale, state.good_steps, state.hysteresis_left, state.steps) == (512.0, 2, 2, 12)
    assert [s.scale for s in run(config, ".", state)] == [1024.0]


def test_a_fresh_deepspeed_state_has_no_good_steps() -> None:
    _, state = load_state_dict({**DEEPSPEED, "cur_iter": 0, "last_overflow_iter": -1}, LossScale.like("deepspeed"))
    assert (state.good_steps, state.steps) == (0, 0)


def test_an_empty_mapping_loads_the_defaults_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="empty loss-scale state"):
        assert load_state_dict({}, CONFIG) == (CONFIG, CONFIG.init())


def own(**changes: Any) -> dict[str, Any]:
    return {**state_dict(CONFIG, CONFIG.init()), **changes}


def without(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in mapping.items() if k != key}


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        pytest.param(None, ["NoneType", "mapping"], id="none"),
        pytest.param([("scale", 1.0)], ["list", "mapping"], id="pairs"),
        pytest.param({"scale": 8.0}, ["scale", "torch", "Megatron", "DeepSpeed"], id="unknown-layout"),
        pytest.param({1: 2}, ["1"], id="keys-that-are-no-text"),
        pytest.param(own(version=2), ["version 2", "reads 1", "upgrade"], id="newer-version"),
        pytest.param(own(version=True), ["version True"], id="version-of-another-type"),
        pytest.param(own(version="1"), ["version '1'"], id="version-as-text"),
        pytest.param(without(own(), "steps"), ["lacks steps"], id="missing"),
        pytest.param(own(extra=1), ["unknown extra"], id="unknown-key"),
        *(pytest.param(own(scale=value), ["scale"], id=f"scale-{value}") for value in (0.0, -1.0, float("inf"), float("nan"), "8", None, 2.0**65)),
        *(
            pytest.param(own(**{key: value}), [key], id=f"{key}-{value}")
            for key in ("good_steps", "skipped", "consecutive_skips", "steps", "hysteresis_left")
            for value in (-1, 1.0, True, None, 2**31)
        ),
        pytest.param(own(hysteresis_left=0), ["hysteresis_left=0", "hysteresis=1"], id="hysteresis-left-0"),
        pytest.param(own(hysteresis_left=2), ["hysteresis_left=2", "hysteresis=1"], id="hysteresis-left-above"),
        pytest.param(own(skipped=2, steps=1), ["skipped=2", "steps=1"], id="more-skips-than-steps"),
        pytest.param(own(consecutive_skips=2, skipped=1, steps=5), ["consecutive_skips=2"], id="more-skips-in-a-row-than-skips"),
        pytest.param(own(kind="none"), ["none"], id="none-with-a-scale"),
        pytest.param(own(kind=["dynamic"]), ["kind"], id="kind-of-another-type"),
        pytest.param(own(growth_factor=1.0), ["growth_factor=1.0"], id="growth-factor"),
        pytest.param(own(min_scale=0.0), ["min_scale=0.0"], id="min-scale"),
        pytest.param(own(init_scale=10**400), ["init_scale"], id="huge-integer"),
        pytest.param({**TORCH, "scale": 0.0}, ["scale=0.0", "_growth_tracker"], id="torch-scale-0"),
        pytest.param({**TORCH, "scale": float("nan")}, ["scale=nan"], id="torch-scale-nan"),
        pytest.param({**TORCH, "growth_interval": 0}, ["growth_interval=0"], id="torch-interval"),
        pytest.param({**TORCH, "growth_interval": float("inf")}, ["growth_interval"], id="torch-interval-inf"),
        pytest.param({**TORCH, "_growth_tracker": -1}, ["good_steps=-1"], id="torch-tracker"),
        pytest.param({**TORCH, "scale": "many"}, ["many"], id="torch-scale-text"),
        pytest.param({**TORCH, "scale": None}, ["_growth_tracker"], id="torch-scale-none"),
        pytest.param({**MEGATRON, "scale": 2.0**101}, ["scale="], id="megatron-scale"),
        pytest.param({**DEEPSPEED, "scale_factor": 0}, ["scale_factor"], id="deepspeed-factor-0"),
        pytest.param({**DEEPSPEED, "scale_window": 0}, ["growth_interval=0"], id="deepspeed-window-0"),
        pytest.param({**DEEPSPEED, "last_overflow_iter": 12}, ["last_overflow_iter=12", "cur_iter=12"], id="deepspeed-future-overflow"),
    ],
)
def test_what_can_not_be_loaded_is_a_state_error_that_says_why(mapping: Any, words: list[str]) -> None:
    with pytest.raises(StateError) as caught:
        load_state_dict(mapping, CONFIG)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    "changed",
    [
        lambda m: {**m, "scale": 16.0},
        lambda m: {**m, "good_steps": 2},
        lambda m: {**m, "growth_interval": 2},
        lambda m: {**m, "backoff_factor": 0.25},
        lambda m: {**m, "max_consecutive_skips": 3},
    ],
)
def test_every_loaded_value_is_used(changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    mapping = changed(own())
    assert state_dict(*load_state_dict(mapping, LossScale.dynamic())) == mapping
