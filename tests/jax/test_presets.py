"""The jmp and flax presets beside the libraries themselves: the same scales on the same events, step by step."""

from __future__ import annotations

import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from flax.training.dynamic_scale import DynamicScale

from polyamp import LossScale

jmp = pytest.importorskip("jmp", reason="jmp is not installed")


def jmp_scales() -> Callable[[bool], float]:
    # Eagerly: under jit jmp loses its floor.
    scale = jmp.DynamicLossScale(jnp.float32(16.0), period=4)

    def step(finite: bool) -> float:
        nonlocal scale
        with jax.numpy_dtype_promotion("standard"):  # jmp multiplies a counter by a bool
            scale = scale.adjust(jnp.asarray(finite))
        return float(scale.loss_scale)

    return step


def flax_scales() -> Callable[[bool], float]:
    scale = DynamicScale(growth_interval=4, scale=jnp.float32(16.0), fin_steps=jnp.int32(0))

    @jax.jit
    def advance(scale: DynamicScale, factor: jax.Array) -> DynamicScale:
        return scale.value_and_grad(lambda p: p * factor)(jnp.float32(1.0))[0]

    def step(finite: bool) -> float:
        nonlocal scale
        scale = advance(scale, jnp.float32(0.0 if finite else jnp.inf))
        return float(scale.scale)

    return step


@pytest.mark.parametrize(("name", "library"), [("jmp", jmp_scales), ("flax", flax_scales)])
def test_preset_follows_the_library(name: str, library: Callable[[], Callable[[bool], float]]) -> None:
    config = LossScale.like(name, init_scale=16.0, growth_interval=4)
    state, theirs, rng = config.init(), library(), random.Random(5)
    for number in range(400):
        finite = rng.random() > 0.15
        state = config.update(state, finite)
        assert theirs(finite) == state.scale, number


def test_flax_defaults() -> None:
    theirs, config = DynamicScale(), LossScale.like("flax")
    assert float(theirs.scale) == config.init_scale
    assert theirs.growth_interval + 1 == config.growth_interval
