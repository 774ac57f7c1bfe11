"""MixedPrecision: the step as a transaction, dtypes, donation, and trees of any shape."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyamp_jax as pj
from polyamp import LossScale, LossScaleError, MisuseError, Policy, PolicyError

SKIPS = ["cond", "where"]


def params() -> dict[str, Any]:
    return {"w": jnp.array([[1.0, -2.0], [0.5, 4.0]]), "b": jnp.array([0.25, -1.0])}


def loss_fn(p: Any, x: Any) -> jax.Array:
    return jnp.mean(jnp.square((x @ p["w"] + p["b"]).astype(jnp.float32)))


def grads_like(p: Any, value: float) -> Any:
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, value, leaf.dtype), p)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@cache
def compiled_step(skip: Any) -> tuple[pj.MixedPrecision, Any]:
    """SGD whose learning rate follows a schedule, so that a moved step count shows."""
    tx = optax.sgd(optax.exponential_decay(0.5, 1, 0.5), momentum=0.5)
    mp = pj.MixedPrecision("mixed_float16", tx, LossScale.dynamic(init_scale=8, growth_interval=100), skip=skip)
    return mp, jax.jit(mp.apply_gradients)


@pytest.mark.parametrize("policy, kind", [("mixed_float16", "dynamic"), ("mixed_bfloat16", "none"), ("float32", "none"), ("float16", "dynamic")])
def test_default_loss_scale_follows_the_policy(policy: str, kind: str) -> None:
    assert pj.MixedPrecision(policy, optax.sgd(1)).init(params()).loss_scale.config.kind == kind


def test_constructor_refuses_what_it_does_not_know() -> None:
    with pytest.raises(PolicyError):
        pj.MixedPrecision("mixed_float17", optax.sgd(1))
    with pytest.raises(LossScaleError, match="'cond'"):
        pj.MixedPrecision("fp16", optax.sgd(1), skip="select")  # type: ignore[arg-type]
    with pytest.raises(LossScaleError, match=r"LossScale\.dynamic"):
        pj.MixedPrecision("fp16", optax.sgd(1), 65536.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float32", "bf16-true"])
def test_value_is_unscaled_and_gradients_are_scaled_float32(policy: str) -> None:
    mp = pj.MixedPrecision(policy, optax.sgd(1), LossScale.static(1024))
    seen = []

    def watched(p: Any, x: Any) -> jax.Array:
        seen.append((p["w"].dtype, p["b"].dtype))
        return loss_fn(p, x)

    state = mp.init(params())
    value, grads = mp.value_and_grad(watched)(state, mp.cast_to_compute(jnp.ones((2, 2))))
    assert seen == [(jnp.dtype(Policy(policy).compute_dtype),) * 2]
    assert value.dtype == jnp.float32
    assert float(value) == (1.75**2 + 1**2) / 2
    assert grads["b"].dtype == jnp.float32
    assert grads["b"].tolist() == [1.75 * 1024, 1024]
    assert state.loss_scale.unscale(grads)["b"].tolist() == [1.75, 1.0]


def test_gradients_carry_the_rounding_and_the_overflow_of_the_compute_dtype() -> None:
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(1), LossScale.static(65536))
    state = mp.init({"tiny": jnp.float32(1), "big": jnp.float32(1), "third": jnp.float32(1)})

    def loss(p: Any) -> jax.Array:
        return (
            p["tiny"].astype(jnp.float32) * 1e-14 + p["big"].astype(jnp.float32) * 1.5 + p["third"].astype(jnp.float32) * jnp.float32(1 / 65536 / 3)
        )

    _, grads = jax.jit(mp.value_and_grad(loss))(state)
    assert float(grads["tiny"]) == 0
    assert float(grads["big"]) == np.inf
    assert float(grads["third"]) == float(np.float16(1 / 3))


def test_a_float16_loss_costs_one_skip_and_then_trains() -> None:
    """The scale is the cotangent of the loss, and float16 has no 65536; a float32 loss takes it at once."""
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(1.0))

    def scales(dtype: str) -> list[float]:
        run = jax.jit(mp.value_and_grad(lambda p: p.astype(dtype) * jnp.asarray(2.0**-10, dtype)))
        states = [mp.init(jnp.float32(3))]
        for _ in range(2):
            states.append(mp.apply_gradients(states[-1], run(states[-1])[1]))
        return [float(state.loss_scale.scale) for state in states]

    assert scales("float16") == [65536, 32768, 32768]
    assert scales("float32") == [65536, 65536, 65536]


@pytest.mark.parametrize("compiled", [False, True])
def test_float16_loss_of_the_largest_default_scale_does_not_overflow(compiled: bool) -> None:
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(1))
    run = mp.value_and_grad(lambda p: p * jnp.float16(2))
    value, grad = (jax.jit(run) if compiled else run)(mp.init(jnp.float32(3)))
    assert float(value) == 6
    assert float(grad) == np.inf  # 2 * 65536 is beyond float16: the gradient says so, the loss does not


def test_has_aux_and_keyword_arguments() -> None:
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(1), LossScale.static(8))

    def loss(p: Any, x: Any, *, power: int) -> tuple[jax.Array, dict[str, Any]]:
        return p * x**power, {"power": power, "dtype": p.dtype}

    (value, aux), grad = mp.value_and_grad(loss, has_aux=True)(mp.init(jnp.float32(2)), jnp.float16(3), power=2)
    assert (float(value), float(grad)) == (18, 72)
    assert aux == {"power": 2, "dtype": jnp.float16}


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("leaf", ["w", "b"])
def test_a_skipped_step_moves_nothing_but_the_scale(skip: Any, bad: float, leaf: str) -> None:
    mp, apply = compiled_step(skip)
    state = apply(mp.init(params()), grads_like(params(), 8.0))
    poisoned = grads_like(params(), 8.0)
    poisoned[leaf] = poisoned[leaf].at[-1].set(bad)
    skipped = apply(state, poisoned)
    assert bits((skipped.params, skipped.opt_state)) == bits((state.params, state.opt_state))
    assert skipped.loss_scale.last_skipped
    assert float(skipped.loss_scale.scale) == 4
    moved = apply(skipped, grads_like(params(), 4.0))
    assert bits(moved.params) != bits(skipped.params)
    assert not moved.loss_scale.last_skipped


@pytest.mark.standard_promotion
@pytest.mark.parametrize("tx", [optax.adamw(1e-2), optax.inject_hyperparams(optax.adam)(1e-2), optax.lion(1e-2)], ids=["adamw", "inject", "lion"])
@pytest.mark.parametrize("skip", SKIPS)
def test_a_run_with_skips_equals_the_run_without_those_steps(tx: Any, skip: Any) -> None:
    mp = pj.MixedPrecision("mixed_bfloat16", tx, LossScale.static(4), skip=skip)
    apply = jax.jit(mp.apply_gradients)
    with_skips = without = mp.init(params())
    for i in range(6):
        good = grads_like(params(), 0.5 * (i + 1))
        with_skips = apply(apply(with_skips, grads_like(params(), np.nan)), good)
        without = apply(without, good)
    assert bits((with_skips.params, with_skips.opt_state)) == bits((without.params, without.opt_state))
    assert int(with_skips.loss_scale.skipped) == 6


def test_sgd_step_is_exact() -> None:
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(0.25, momentum=0.5), LossScale.dynamic(init_scale=2.0**20))
    state = mp.init(params())
    for _ in range(2):
        state = mp.apply_gradients(state, grads_like(params(), 2.0**20))
    assert state.params["b"].tolist() == [0.25 - 0.25 - 0.25 * 1.5, -1.0 - 0.25 - 0.25 * 1.5]


def test_clipping_in_the_chain_sees_unscaled_gradients() -> None:
    mp = pj.MixedPrecision("mixed_float16", optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), LossScale.static(1024))
    state = mp.apply_gradients(mp.init({"a": jnp.zeros(2)}), {"a": jnp.array([0.5, 0.25]) * 1024})
    assert state.params["a"].tolist() == [-0.5, -0.25]


@pytest.mark.parametrize("skip", SKIPS)
def test_gradient_that_overflows_in_unscaling_is_skipped(skip: Any) -> None:
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(1.0), LossScale.dynamic(init_scale=2.0**-10), skip=skip)
    apply, start = jax.jit(mp.apply_gradients), mp.init({"a": jnp.ones(3)})
    state = apply(start, {"a": jnp.array([1, 3e38, 1], jnp.float32)})
    assert state.loss_scale.last_skipped
    assert bits(state.params) == bits(start.params)
    assert not apply(start, {"a": jnp.full(3, 1e30, jnp.float32)}).loss_scale.last_skipped


def test_a_scale_of_one_or_more_checks_raw_gradients_up_to_the_largest() -> None:
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(2.0**-100), LossScale.dynamic(init_scale=2, min_scale=1))
    state = mp.apply_gradients(mp.init(jnp.ones(64)), jnp.full(64, 3e38, jnp.float32))
    assert not state.loss_scale.last_skipped
    assert np.isfinite(state.params).all()


def test_without_a_check_nothing_is_skipped() -> None:
    mp = pj.MixedPrecision("mixed_bfloat16", optax.sgd(1.0))
    state = mp.apply_gradients(mp.init(jnp.ones(2)), jnp.array([np.nan, 1], jnp.float32))
    assert np.isnan(state.params).tolist() == [True, False]
    assert state.loss_scale.values().steps == 1
    assert state.loss_scale.values().skipped == 0
    checked = pj.MixedPrecision("mixed_bfloat16", optax.sgd(1.0), LossScale.none(check=True))
    assert checked.apply_gradients(checked.init(jnp.ones(2)), jnp.array([np.nan, 1], jnp.float32)).params.tolist() == [1, 1]


def test_leaves_without_a_gradient_stay_as_they_are() -> None:
    tree = {
        "table": jnp.ones((3, 2), jnp.float16),
        "ids": np.array([2049, 7]),
        "key": jax.random.key(3),
        "flag": True,
        "count": 5,
        "none": None,
        "empty": {},
        "complex": jnp.array([1 + 1j], jnp.complex64),
    }
    mp = pj.MixedPrecision("mixed_bfloat16", optax.sgd(0.5, momentum=0.5), LossScale.static(2))
    state = mp.init(tree)

    def loss(p: Any) -> jax.Array:
        assert p["table"].dtype == jnp.bfloat16
        assert p["ids"].dtype == jnp.int32
        assert p["complex"].dtype == jnp.complex64
        noise = jax.random.normal(p["key"], (2,)).astype(jnp.bfloat16)
        return jnp.sum(p["table"] @ (noise * jnp.bfloat16(0) + jnp.bfloat16(1))).astype(jnp.float32) + jnp.sum(jnp.abs(p["complex"]) ** 2)

    @partial(jax.jit, donate_argnums=0)
    def step(state: pj.TrainState) -> pj.TrainState:
        _, grads = mp.value_and_grad(loss)(state)
        assert grads["ids"] is grads["key"] is grads["flag"] is grads["count"] is None
        return mp.apply_gradients(state, grads)

    dtypes = [leaf.dtype for leaf in jax.tree.leaves(state)]
    state = step(step(state))
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == dtypes
    assert state.params["ids"].tolist() == [2049, 7]
    assert int(state.params["count"]) == 5
    assert bool(state.params["flag"])
    assert state.params["none"] is None
    assert (jax.random.key_data(state.params["key"]) == jax.random.key_data(tree["key"])).all()
    assert state.params["table"].dtype == jnp.float32
    assert float(state.params["table"][0, 0]) == 1 - 0.5 - 0.75
    assert state.params["complex"].tolist() != [1 + 1j]


@pytest.mark.parametrize("tree", [{}, None, {"ids": jnp.arange(3)}])
def test_trees_without_a_differentiable_leaf(tree: Any) -> None:
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(0.5, momentum=0.5))
    state = mp.init(tree)
    value, grads = mp.value_and_grad(lambda p: jnp.float32(3))(state)
    assert float(value) == 3
    assert jax.jit(mp.apply_gradients)(state, grads).loss_scale.values().good_steps == 1


def test_leaves_that_are_no_arrays_are_an_error_that_names_them() -> None:
    with pytest.raises(MisuseError, match=r"params\['f'\] is a function"):
        pj.MixedPrecision("fp16", optax.sgd(1)).init({"f": params})


def test_other_gradient_trees_are_an_error() -> None:
    mp = pj.MixedPrecision("fp16", optax.sgd(1))
    with pytest.raises(MisuseError, match="None where a leaf has no gradient"):
        mp.apply_gradients(mp.init(params()), {"w": params()["w"]})


@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "tx", [optax.sgd(0.5, momentum=0.5), optax.adamw(1e-3), optax.inject_hyperparams(optax.adamw)(1e-3)], ids=["sgd", "adamw", "inject"]
)
@pytest.mark.parametrize("skip", SKIPS)
def test_types_are_invariant_and_a_step_compiles_once(tx: Any, skip: Any, counted: Any) -> None:
    mp = pj.MixedPrecision("mixed_float16", tx, LossScale.dynamic(init_scale=2.0**16, growth_interval=2), skip=skip)

    def step(state: pj.TrainState, x: jax.Array) -> pj.TrainState:
        return mp.apply_gradients(state, mp.value_and_grad(loss_fn)(state, mp.cast_to_compute(x))[1])

    body, traces = counted(step)
    compiled = jax.jit(body, donate_argnums=0)
    state = mp.init(params() | {"number": 1.5, "count": 3})

    def types(tree: Any) -> Any:
        return jax.tree.structure(tree), [(leaf.shape, leaf.dtype, leaf.weak_type) for leaf in jax.tree.leaves(tree)]

    before = types(state)
    assert not any(weak for *_, weak in before[1])
    for _ in range(5):
        state = compiled(state, jnp.ones((4, 2)))
        assert types(state) == before
    assert traces == [1]
    assert 0 < int(state.loss_scale.skipped) < 5


@pytest.mark.parametrize("skip", SKIPS)
def test_an_optimizer_that_promotes_its_state_is_held_to_its_types(skip: Any, counted: Any) -> None:
    """Weakly typed numbers and a moment in another dtype are what real transformations carry."""

    def init(params: Any) -> dict[str, Any]:
        return {"rate": jnp.asarray(0.5), "moment": jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), "count": 0}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        moment = jax.tree.map(lambda m, g: m.astype(jnp.float32) + g, state["moment"], updates)
        return updates, {"rate": state["rate"] * 0.5, "moment": moment, "count": state["count"] + 1}

    mp = pj.MixedPrecision("mixed_float16", optax.GradientTransformation(init, update), LossScale.static(2), skip=skip)
    body, traces = counted(mp.apply_gradients)
    apply, state = jax.jit(body), mp.init(jnp.zeros(2))
    for step in range(1, 4):
        state = apply(state, jnp.ones(2))
        carried = state.opt_state
        assert [carried[k].dtype for k in ("rate", "moment", "count")] == [jnp.float32, jnp.bfloat16, jnp.int32]
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
        assert (float(carried["rate"]), carried["moment"].tolist(), int(carried["count"])) == (0.5 ** (step + 1), [0.5 * step] * 2, step)
    assert traces == [1]


def test_donation_takes_no_array_of_the_caller() -> None:
    shared = jnp.ones((2, 2))
    tree = {"w": shared, "tied": shared, "b": jnp.array([0.25, -1.0])}
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(0.5, momentum=0.5))
    apply = jax.jit(mp.apply_gradients, donate_argnums=0)
    for _ in range(2):  # twice from the same parameters
        state = mp.init(tree)
        for _ in range(3):
            state = apply(state, grads_like(tree, 1.0))
    assert shared.tolist() == [[1, 1], [1, 1]]
    assert tree["b"].tolist() == [0.25, -1]


@pytest.mark.parametrize("skip", SKIPS)
def test_vmap_over_runs_skips_each_by_its_own_gradients(skip: Any) -> None:
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(0.5, momentum=0.5), LossScale.dynamic(init_scale=4), skip=skip)
    state = mp.init(jnp.ones(2))
    runs = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), state)
    grads = jnp.array([[4, 8], [np.inf, 4], [np.nan, 4]], jnp.float32)
    out = jax.jit(jax.vmap(mp.apply_gradients))(runs, grads)
    assert out.params.tolist() == [[0.5, 0], [1, 1], [1, 1]]
    assert out.loss_scale.last_skipped.tolist() == [False, True, True]
    assert out.opt_state[0].trace.tolist() == [[1, 2], [0, 0], [0, 0]]


def test_whole_run_inside_scan_equals_the_loop() -> None:
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(2.0**-6, momentum=0.5), LossScale.dynamic(init_scale=2.0**18, growth_interval=3))
    batches = jnp.asarray(np.random.default_rng(1).integers(-4, 5, (20, 4, 2)), jnp.float16) / jnp.float16(4)

    def step(state: pj.TrainState, x: jax.Array) -> tuple[pj.TrainState, jax.Array]:
        loss, grads = mp.value_and_grad(loss_fn)(state, x)
        return mp.apply_gradients(state, grads), loss

    looped, compiled = mp.init(params()), jax.jit(step)
    for x in batches:
        looped, _ = compiled(looped, x)
    scanned, losses = jax.lax.scan(step, mp.init(params()), batches)
    assert scanned.loss_scale.values() == looped.loss_scale.values()
    assert losses.shape == (20,)
    np.testing.assert_allclose(scanned.params["w"], looped.params["w"], rtol=1e-5)


def test_masters_keep_updates_that_16_bit_parameters_lose() -> None:
    mp = pj.MixedPrecision("bf16-true", optax.sgd(1.0))
    apply, state = jax.jit(mp.apply_gradients, donate_argnums=0), mp.init(jnp.ones(1, jnp.bfloat16))
    for _ in range(4096):
        state = apply(state, jnp.full(1, -(2.0**-12), jnp.float32))
    assert state.params.dtype == jnp.float32
    assert state.params.tolist() == [2.0]
    assert mp.cast_to_param(state.params).dtype == jnp.bfloat16


def test_gradients_of_any_float_dtype_are_taken() -> None:
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(1.0), LossScale.static(1024))
    state = mp.apply_gradients(mp.init(jnp.zeros(1)), jnp.array([1.0251998901367188e-05], jnp.float16))
    assert state.params.tolist() == [-1.0011717677116394e-08]
    assert state.params.dtype == jnp.float32


def test_extra_arguments_reach_the_transformation() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, factor: Any, **extra: Any) -> tuple[Any, Any]:
        return jax.tree.map(lambda g: -g * factor, updates), state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    mp = pj.MixedPrecision("mixed_bfloat16", tx)
    assert mp.apply_gradients(mp.init(jnp.zeros(1)), jnp.ones(1), factor=jnp.float32(3)).params.tolist() == [-3]


def test_casts_by_role_touch_floating_arrays_only() -> None:
    mp = pj.MixedPrecision("params=float32,compute=float16,output=bfloat16", optax.sgd(1))
    tree = {"x": jnp.ones(1), "np": np.ones(1, np.float64), "id": jnp.array([2049]), "c": jnp.array([1j]), "n": 1.5, "k": jax.random.key(0)}
    for cast, dtype in ((mp.cast_to_compute, "float16"), (mp.cast_to_param, "float32"), (mp.cast_to_output, "bfloat16")):
        out = cast(tree)
        assert (out["x"].dtype, out["np"].dtype) == (jnp.dtype(dtype),) * 2
        assert out["id"].tolist() == [2049]
        assert out["c"].dtype == jnp.complex64
        assert out["n"] == 1.5
        assert out["k"] is tree["k"]


def test_repr_says_what_it_is() -> None:
    text = repr(pj.MixedPrecision("mixed_float16", optax.sgd(1), LossScale.static(8)))
    assert text == "MixedPrecision('params=float32,compute=float16,output=float32,reduce=float32', loss_scale=static(8), skip='cond')"
