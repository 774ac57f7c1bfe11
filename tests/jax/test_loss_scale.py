"""The loss scale as a pytree: the transition against the spec, types, and what transformations do to it."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyamp_jax as pj
from polyamp import LossScale, MisuseError, StateError
from polyamp import LossScaleState as Reference
from polyamp.state import state_dict

dynamic = LossScale.dynamic
CONFIGS = {
    "default": dynamic(growth_interval=3),
    "interval_1": dynamic(init_scale=8, growth_interval=1, max_scale=64, min_scale=1),
    "floor": dynamic(init_scale=2, growth_interval=50, min_scale=0.25),
    "ceiling": dynamic(init_scale=2.0**98, growth_interval=2, max_scale=2.0**100),
    "refill_finite": dynamic(growth_interval=4, hysteresis=3),
    "refill_growth": dynamic(growth_interval=4, hysteresis=3, hysteresis_refill="growth"),
    "odd_factors": dynamic(init_scale=1000.7, growth_factor=1.3, backoff_factor=0.37, growth_interval=2),
    "static": LossScale.static(1024),
    "none": LossScale.none(check=True),
    "flax": LossScale.like("flax", growth_interval=3),
    "megatron": LossScale.like("megatron", growth_interval=3),
}
flag_lists = st.lists(st.sampled_from([True, True, False]), min_size=48, max_size=48)


def reference(config: LossScale, flags: list[bool], state: Reference | None = None) -> list[Reference]:
    states = [config.init() if state is None else state]
    for flag in flags:
        states.append(config.update(states[-1], flag))
    return states[1:]


@partial(jax.jit, donate_argnums=0)
def jitted(state: pj.LossScaleState, finite: jax.Array) -> pj.LossScaleState:
    return state.update(finite)


@jax.jit
def scanned(state: pj.LossScaleState, flags: jax.Array) -> tuple[pj.LossScaleState, pj.LossScaleState]:
    def body(s: pj.LossScaleState, flag: jax.Array) -> tuple[pj.LossScaleState, pj.LossScaleState]:
        new = s.update(flag)
        return new, new

    return jax.lax.scan(body, state, flags)


def unstacked(states: pj.LossScaleState, count: int) -> list[Reference]:
    host = jax.device_get(states)
    return [jax.tree.map(lambda leaf, i=i: jnp.asarray(leaf[i]), host).values() for i in range(count)]


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=8, deadline=None)
@given(flags=flag_lists)
def test_transition_equals_the_spec_in_scan_and_jit(name: str, flags: list[bool]) -> None:
    config = CONFIGS[name]
    expected = reference(config, flags)
    last, states = scanned(pj.LossScaleState.init(config), jnp.array(flags))
    assert unstacked(states, len(flags)) == expected
    assert last.values() == expected[-1]
    state = pj.LossScaleState.init(config)
    for flag, want in zip(flags[:12], expected[:12], strict=True):
        state = jitted(state, jnp.array(flag))
        assert state.values() == want


@st.composite
def configs(draw: st.DrawFn) -> LossScale:
    low, high = sorted(draw(st.lists(st.floats(2.0**-100, 2.0**100, width=32), min_size=2, max_size=2)))
    return dynamic(
        init_scale=draw(st.floats(low, high, width=32)),
        growth_factor=draw(st.floats(1.0009765625, 2.0**40, width=32)),
        backoff_factor=draw(st.floats(2.0**-40, 0.9990234375, width=32)),
        growth_interval=draw(st.integers(1, 3)),
        hysteresis=draw(st.integers(1, 3)),
        hysteresis_refill=draw(st.sampled_from(["finite", "growth"])),
        min_scale=low,
        max_scale=high,
    )


@settings(max_examples=40, deadline=None)
@given(config=configs(), flags=st.lists(st.booleans(), min_size=8, max_size=8))
def test_transition_equals_the_spec_for_any_configuration(config: LossScale, flags: list[bool]) -> None:
    state = pj.init(config)
    for flag, want in zip(flags, reference(config, flags), strict=True):
        state = pj.update(state, flag)
        assert state.values() == want


def test_lowered_interval_grows_at_once() -> None:
    """A counter beyond the interval, from a longer run or a changed configuration, grows on the next finite step instead of never."""
    before = Reference(scale=8.0, good_steps=500, steps=500)
    config = dynamic(growth_interval=4)
    state = pj.LossScaleState.from_state_dict(state_dict(config, before))
    assert jitted(state, jnp.array(True)).values() == Reference(scale=16.0, good_steps=0, steps=501)


def test_floor_holds_under_jit_where_jmp_loses_it() -> None:
    state = pj.init(dynamic(init_scale=8, min_scale=4))
    for _ in range(4):
        state = jitted(state, jnp.array(False))
    assert state.values().scale == 4.0


def test_growth_ends_at_the_ceiling_and_never_becomes_infinite() -> None:
    _, states = scanned(pj.init(LossScale.like("flax", init_scale=2.0**90, growth_interval=1)), jnp.ones(60, bool))
    assert float(jnp.max(states.scale)) == 2.0**100


def test_counters_stay_at_the_largest_int32() -> None:
    state = jax.tree.map(lambda leaf: leaf, pj.init(LossScale.static(2)))
    full = jax.tree.map(lambda leaf: jnp.int32(2**31 - 1) if leaf.dtype == jnp.int32 else leaf, state)
    assert full.update(False).values().skipped == 2**31 - 1
    assert full.update(True).values().good_steps == 2**31 - 1


def assert_typed(state: pj.LossScaleState) -> None:
    for field in fields(Reference):
        leaf = getattr(state, field.name)
        assert leaf.shape == ()
        assert leaf.dtype == (jnp.float32 if field.name == "scale" else jnp.int32)
        assert not leaf.weak_type


@pytest.mark.parametrize("flag", [True, False, np.bool_(True), np.array(False), jnp.array(True)])
@pytest.mark.parametrize("name", CONFIGS)
def test_leaves_are_strongly_typed_from_the_first_state_on(name: str, flag: Any) -> None:
    state = pj.init(CONFIGS[name])
    assert_typed(state)
    assert_typed(state.update(flag))
    assert_typed(jax.jit(lambda s: s.update(flag))(state))


def test_compiles_once(counted: Any) -> None:
    body, traces = counted(lambda state, finite: state.update(finite))
    step = jax.jit(body)
    state = pj.init(dynamic(growth_interval=2))
    for flag in (True, False, True, True):
        state = step(state, jnp.array(flag))
    state = step(pj.LossScaleState.from_state_dict(json.loads(json.dumps(state.state_dict()))), jnp.array(True))
    assert traces == [1]


def test_configuration_is_static_and_survives_flattening() -> None:
    config = CONFIGS["odd_factors"]
    leaves, structure = jax.tree.flatten(pj.init(config))
    assert len(leaves) == 6
    assert jax.tree.unflatten(structure, leaves).config is config
    assert jax.tree.structure(pj.init(config)) == structure
    assert jax.tree.structure(pj.init(dynamic())) != structure
    assert pickle.loads(pickle.dumps(structure.unflatten(leaves))).config == config


def test_unflattening_takes_any_leaf() -> None:
    """Checkpointers and transformations put placeholders, specs and None where arrays will be."""
    structure = jax.tree.structure(pj.init(dynamic()))
    for placeholder in (object(), None, "spec", jax.ShapeDtypeStruct((), jnp.float32)):
        assert structure.unflatten([placeholder] * 6).scale is placeholder


def test_vmap_updates_each_state_by_its_own_flag() -> None:
    config = dynamic(init_scale=8, growth_interval=1)
    batch = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), pj.init(config))
    flags = jnp.array([True, False, True])
    assert jax.vmap(pj.update)(batch, flags).scale.tolist() == [16.0, 4.0, 16.0]
    with pytest.raises(MisuseError, match=r"scale of shape \(3,\)"):
        batch.values()


def test_last_skipped() -> None:
    state = pj.init(dynamic())
    assert not state.last_skipped
    assert state.update(False).last_skipped
    assert not state.update(False).update(True).last_skipped


@pytest.mark.parametrize("shape", [(), (1,), (3,)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_float16_loss_is_scaled_in_float32(shape: tuple[int, ...], compiled: bool) -> None:
    scale = jax.jit(pj.scale) if compiled else pj.scale
    scaled = scale(pj.init(dynamic(init_scale=65536)), jnp.full(shape, 3, jnp.float16))
    assert scaled.dtype == jnp.float32
    assert scaled.shape == shape
    assert (scaled == 196608.0).all()


def test_scaling_takes_python_numbers_and_refuses_integers() -> None:
    state = pj.init(dynamic(init_scale=4))
    assert not state.scale_loss(1.5).weak_type
    assert float(state.scale_loss(1.5)) == 6.0
    with pytest.raises(MisuseError, match="int32"):
        state.scale_loss(jnp.int32(3))


def test_unscale_is_float32_and_exact_for_powers_of_two() -> None:
    state = pj.init(dynamic(init_scale=1024))
    grads = {"half": jnp.float16(1.0251998901367188e-05), "bf16": jnp.bfloat16(3), "full": jnp.float32(5), "n": jnp.int32(7), "none": None}
    out = state.unscale(grads)
    assert float(out["half"]) == 1.0011717677116394e-08
    assert float(out["bf16"]) == 3 / 1024
    assert float(out["full"]) == 5 / 1024
    assert [out[k].dtype for k in ("half", "bf16", "full", "n")] == [jnp.float32] * 3 + [jnp.int32]
    assert int(out["n"]) == 7
    assert out["none"] is None


def test_unscale_keeps_complex_parts_apart() -> None:
    out = pj.unscale(pj.init(dynamic(init_scale=4)), jnp.array([8 + 12j, complex(np.inf, 4)], jnp.complex64))
    assert out.dtype == jnp.complex64
    assert out.tolist() == [2 + 3j, complex(np.inf, 1)]


@pytest.mark.parametrize("name", CONFIGS)
def test_state_dict_resumes_in_the_middle(name: str) -> None:
    config, flags = CONFIGS[name], [True, False, True, True, False, False, True, True, True, True, False]
    state = pj.init(config)
    for i, want in enumerate(reference(config, flags)):
        state = state.update(flags[i])
        assert state.values() == want
        state = pj.LossScaleState.from_state_dict(json.loads(json.dumps(state.state_dict())))
        assert state.config == config
        assert_typed(state)


def test_loading_validates() -> None:
    mapping = pj.init(dynamic()).state_dict()
    with pytest.raises(StateError, match="scale=inf"):
        pj.LossScaleState.from_state_dict({**mapping, "scale": float("inf")})
    with pytest.raises(StateError, match="version"):
        pj.LossScaleState.from_state_dict({**mapping, "version": 99})


def test_torch_layout_loads_into_a_configuration() -> None:
    torch = {"scale": 32.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 3}
    state = pj.LossScaleState.from_state_dict(torch, dynamic(min_scale=1))
    assert state.config == dynamic(min_scale=1, growth_interval=7)
    assert state.values() == Reference(scale=32.0, good_steps=3)


def test_values_inside_jit_is_an_error_with_a_remedy() -> None:
    with pytest.raises(MisuseError, match="outside jit"):
        jax.jit(lambda state: state.state_dict()["scale"])(pj.init(dynamic()))
