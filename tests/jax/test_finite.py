"""Finiteness checks: exact for every value, position, size and dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import polyamp_jax as pj

BAD = [np.nan, np.inf, -np.inf]
check = jax.jit(pj.all_finite)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_finds_one_bad_value_at_any_place(dtype: str, bad: float, size: int) -> None:
    good = jnp.linspace(-2, 2, size).astype(dtype)
    assert check([good, good])
    for place in {0, size // 2, size - 1, (size * 5) // 7}:
        assert not check([good, good.at[place].set(bad)])


def test_finds_a_nan_that_a_vectorised_maximum_loses() -> None:
    """Large two-dimensional leaves go through the CPU backend's fused reductions, where max(|x|) drops a NaN in some jaxlib versions."""
    good = np.random.default_rng(0).standard_normal((960, 320)).astype(np.float32)
    for bad in BAD:
        for place in [(0, 0), (5, 7), (500, 319), (959, 311)]:
            leaf = good.copy()
            leaf[place] = bad
            assert not check({"a": jnp.asarray(good), "b": jnp.asarray(leaf)})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_large_finite_values_are_no_false_alarm(dtype: str) -> None:
    """Their sum is infinite, so a check of the sum would skip a good step."""
    assert check([jnp.full((100, 100), jnp.finfo(dtype).max, dtype)])


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(width=32), min_size=5, max_size=5))
def test_equals_numpy(values: list[float]) -> None:
    assert bool(check(jnp.array(values, jnp.float32))) == bool(np.isfinite(np.float32(values)).all())


@pytest.mark.parametrize("tree", [{}, None, [None, ()], {"a": jnp.zeros((0, 3))}, {"i": jnp.arange(3), "b": jnp.array(True), "n": 3}])
def test_what_cannot_be_infinite_is_finite(tree: Any) -> None:
    flag = pj.all_finite(tree)
    assert flag.dtype == jnp.bool_
    assert flag.shape == ()
    assert flag


def test_keys_and_complex() -> None:
    assert check({"key": jax.random.key(0), "c": jnp.array([1 + 2j])})
    assert not check({"c": jnp.array([complex(1, np.nan)])})
    assert not pj.all_finite([1.0, float("inf")])


def test_flag_is_per_example_under_vmap() -> None:
    rows = jnp.array([[1, 2], [np.nan, 1], [1, np.inf]], jnp.float32)
    assert jax.vmap(pj.all_finite)(rows).tolist() == [True, False, False]


def test_status_and_names_agree_in_order() -> None:
    grads = {
        "b": {"kernel": jnp.array([1, np.inf]), "bias": jnp.array([np.nan])},
        "a": [jnp.ones(3), None, jnp.array([np.inf, np.nan])],
        "empty": jnp.zeros(0),
        "id": jnp.arange(2),
    }
    status = jax.jit(pj.gradient_status)(grads)
    assert status.dtype == jnp.uint8
    assert dict(zip(pj.leaf_names(grads), status.tolist(), strict=True)) == {"a/0": 0, "a/2": 3, "b/bias": 2, "b/kernel": 1, "empty": 0}
    assert pj.gradient_status({}).shape == (0,)


def test_select_lets_nothing_of_the_other_tree_through() -> None:
    good, bad = {"x": jnp.ones(2), "n": jnp.int32(1)}, {"x": jnp.full(2, np.nan), "n": jnp.int32(2)}
    for flag, a, b in ((True, good, bad), (False, bad, good)):
        chosen = pj.select(jnp.array(flag), a, b)
        assert chosen["x"].tolist() == [1, 1]
        assert int(chosen["n"]) == 1
