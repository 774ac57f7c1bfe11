"""One step is a transaction: verdict, unscale, inner optimizer or nothing, transition."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from polyamp import LossScale, MisuseError, UnsupportedError
from polyamp_keras import LossScaleOptimizer
from polyamp_keras.native import compiled
from polyamp_keras.runner.applier import make_applier

from .models import data, read, replay, same, small_model, state_of, tensors, variables


def inner_with_everything() -> keras.optimizers.Optimizer:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    return keras.optimizers.AdamW(schedule, weight_decay=0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=None)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", [0, 1])
def test_a_skip_moves_nothing_but_the_loss_scale(execution: str, bad: float, where: int) -> None:
    w = variables([1.0, 2.0], [3.0])
    optimizer = LossScaleOptimizer(inner_with_everything(), LossScale.dynamic(init_scale=8))
    apply = make_applier(optimizer, w, execution)
    apply([np.full(2, 8.0), np.full(1, 8.0)])
    kept = [*w, *optimizer.inner_optimizer.variables]
    before = read(kept)
    gradients = [np.full(2, 8.0), np.full(1, 8.0)]
    gradients[where][-1] = bad
    apply(gradients)
    assert same(before, read(kept))
    assert state_of(optimizer) == replay(optimizer.loss_scale, [True, False])[-1]
    apply([np.full(2, 8.0), np.full(1, 8.0)])
    assert not same(before, read(kept))
    assert int(read([optimizer.iterations])[0]) == 2


def test_gradients_are_unscaled_in_float32(execution: str) -> None:
    w = variables([0.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale.static(2.0**20))
    make_applier(optimizer, w, execution)([np.array([1.0])])
    assert read(w)[0].tolist() == [-(2.0**-20)]  # zero in float16


def test_sixteen_bit_gradients_are_unscaled_in_float32() -> None:
    w = variables([0.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale.static(2.0**30))
    optimizer.apply(tensors([1.0], dtype="float16"), w)
    assert read(w)[0].tolist() == [-(2.0**-30)]


def test_a_finite_gradient_that_unscales_to_infinity_is_skipped(execution: str) -> None:
    w = variables([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale.dynamic(init_scale=2.0**-10, min_scale=2.0**-20))
    make_applier(optimizer, w, execution)([np.array([3e38])])
    assert read(w)[0].tolist() == [1.0]
    assert state_of(optimizer).skipped == 1
    assert [record.reason for record in optimizer.recent_steps()] == ["overflow"]


def test_scale_in_force_is_the_one_before_the_update(execution: str) -> None:
    w = variables([0.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale.dynamic(init_scale=4, growth_interval=1))
    make_applier(optimizer, w, execution)([np.array([4.0])])
    assert read(w)[0].tolist() == [-1.0]
    assert float(ops.convert_to_numpy(optimizer.scale_loss(ops.convert_to_tensor(1.0)))) == 8.0


def test_clipping_sees_unscaled_gradients(execution: str) -> None:
    w = variables([0.0, 0.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=1.0), LossScale.static(1024))
    make_applier(optimizer, w, execution)([np.array([0.25 * 1024, 0.0])])
    assert read(w)[0].tolist() == [-0.25, 0.0]


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
def test_none_counts_as_finite() -> None:
    w = variables([1.0], [1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale.static(2))
    optimizer.apply(tensors([2.0], None), w)
    assert [value.tolist() for value in read(w)] == [[0.0], [1.0]]
    optimizer.apply(tensors(None, [np.inf]), w)
    assert [value.tolist() for value in read(w)] == [[0.0], [1.0]]
    assert state_of(optimizer).skipped == 1


def test_no_gradients_at_all_is_an_event_and_no_crash() -> None:
    w = variables([1.0], [1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale.static(2))
    optimizer.apply([None, None], w)
    (record,) = optimizer.recent_steps()
    assert (record.skipped, record.reason) == (False, "no_gradients")
    assert state_of(optimizer).steps == 1
    assert int(read([optimizer.iterations])[0]) == 0


@pytest.mark.parametrize(("gradients", "reason"), [([np.inf, 1], "overflow"), ([np.nan, 1], "nan"), ([np.nan, np.inf], "overflow"), ([1, 1], None)])
def test_reasons(gradients: list[float], reason: str | None, execution: str) -> None:
    optimizer = LossScaleOptimizer("sgd")
    make_applier(optimizer, variables([0.0, 0.0]), execution)([np.array(gradients)])
    assert [(record.skipped, record.reason) for record in optimizer.recent_steps()] == [(reason is not None, reason)]


def test_none_without_check_takes_every_step() -> None:
    w = variables([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale.none())
    optimizer.apply(tensors([np.inf]), w)
    assert read(w)[0].tolist() == [-np.inf]
    assert (state_of(optimizer).scale, state_of(optimizer).skipped) == (1.0, 0)


def test_none_with_check_skips_and_keeps_the_scale() -> None:
    w = variables([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale.none(check=True))
    optimizer.apply(tensors([np.inf]), w)
    assert read(w)[0].tolist() == [1.0]
    assert (state_of(optimizer).scale, state_of(optimizer).skipped) == (1.0, 1)


def test_static_scale_skips_and_stays() -> None:
    optimizer = LossScaleOptimizer("sgd", 64)
    optimizer.apply(tensors([np.nan]), variables([1.0]))
    assert (state_of(optimizer).scale, state_of(optimizer).skipped) == (64.0, 1)


def test_170_overflows_then_a_good_step(execution: str) -> None:
    w = variables([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale.dynamic(max_consecutive_skips=None))
    apply = make_applier(optimizer, w, execution)
    for _ in range(170):
        apply([np.array([np.inf])])
    assert state_of(optimizer).scale == 2.0**-24
    apply([np.array([2.0**-24])])
    assert read(w)[0].tolist() == [0.0]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([1.0, np.inf, np.nan]), max_size=20), st.sampled_from(["torch", "deepspeed", "megatron", "flax"]))
def test_random_events_follow_the_reference(values: list[float], preset: str) -> None:
    config = LossScale.like(preset, init_scale=64, growth_interval=3)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), config)
    w = variables([0.0])
    for value in values:
        optimizer.apply(tensors([value]), w)
    assert state_of(optimizer) == replay(config, [value == 1.0 for value in values])[-1]


def test_loss_is_scaled_in_float32() -> None:
    optimizer = LossScaleOptimizer("sgd", 2.0**16)
    scaled = optimizer.scale_loss(ops.convert_to_tensor(np.float16(3.0)))
    assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
    assert float(ops.convert_to_numpy(scaled)) == 3 * 2.0**16  # infinite in float16


def test_a_subset_of_the_variables() -> None:
    w = variables([1.0], [1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, momentum=0.5), LossScale.static(2))
    optimizer.build(w)
    optimizer.apply(tensors([2.0]), [w[1]])
    assert [value.tolist() for value in read(w)] == [[1.0], [0.0]]


def test_apply_gradients_as_custom_loops_call_it() -> None:
    w = variables([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale.static(2))
    optimizer.apply_gradients(zip(tensors([2.0]), w, strict=True))
    assert read(w)[0].tolist() == [0.0]


def test_misuse_says_what_to_do() -> None:
    optimizer = LossScaleOptimizer("sgd")
    with pytest.raises(MisuseError, match=r"apply\(grads, trainable_variables\)"):
        optimizer.apply(tensors([1.0]))
    with pytest.raises(MisuseError, match="2 gradients for 1 variables"):
        optimizer.apply(tensors([1.0], [1.0]), variables([1.0]))


@pytest.mark.only("jax", "torch")
def test_stateless_apply_returns_new_values_and_leaves_the_variables() -> None:
    w = variables([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale.dynamic(init_scale=2, growth_interval=1))
    with pytest.raises(MisuseError, match=r"optimizer\.build"):
        optimizer.stateless_apply([], tensors([1.0]), tensors([1.0]))
    optimizer.build(w)
    values = [ops.copy(v.value) for v in optimizer.variables]
    with pytest.raises(MisuseError, match="expected"):
        optimizer.stateless_apply(values[:-1], tensors([1.0]), tensors([1.0]))
    step = compiled(optimizer.stateless_apply)
    new, state = step(values, tensors([2.0]), tensors([1.0]))
    index = [v is optimizer.dynamic_scale for v in optimizer.variables].index(True)
    assert [ops.convert_to_numpy(value).tolist() for value in new] == [[0.0]]
    assert float(ops.convert_to_numpy(state[index])) == 4.0
    assert (read(w)[0].tolist(), state_of(optimizer).scale) == ([1.0], 2.0)
    new, state = step(state, tensors([np.inf]), new)
    assert [ops.convert_to_numpy(value).tolist() for value in new] == [[0.0]]
    assert float(ops.convert_to_numpy(state[index])) == 2.0


@pytest.mark.only("tensorflow")
def test_stateless_apply_says_what_to_call_on_tensorflow() -> None:
    optimizer = LossScaleOptimizer("sgd")
    with pytest.raises(UnsupportedError, match=r"call apply\(\)"):
        optimizer.stateless_apply([], [], [])


@pytest.mark.only("jax")
def test_apply_inside_a_jitted_loop_with_a_stateless_scope() -> None:
    w = variables([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale.static(2))
    optimizer.build(w)

    @compiled
    def step(values, state, gradients):
        with keras.StatelessScope(state_mapping=[*zip(w, values, strict=True), *zip(optimizer.variables, state, strict=True)]) as scope:
            optimizer.apply(gradients, w)
        return [scope.get_current_value(v) for v in w]

    (value,) = step([w[0].value], [v.value for v in optimizer.variables], tensors([2.0]))
    assert ops.convert_to_numpy(value).tolist() == [0.0]
    assert read(w)[0].tolist() == [1.0]


def test_sparse_embedding_gradients() -> None:
    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(10, 4), keras.layers.Flatten(), keras.layers.Dense(1)])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1), LossScale.dynamic(init_scale=1024))
    model.compile(optimizer, "mse")
    before = model.get_weights()
    rows = np.arange(3 * 8).reshape(8, 3) % 10
    model.train_on_batch(rows, np.ones((8, 1), "float32"))
    assert not same(before, model.get_weights())
    before = model.get_weights()
    model.train_on_batch(rows, np.full((8, 1), np.inf, "float32"))
    assert same(before, model.get_weights())
    assert (state_of(optimizer).steps, state_of(optimizer).skipped) == (2, 1)


def test_float8_variables_take_their_gradient_unscaled() -> None:
    w = variables([1.0], [5.0])
    w[1].overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), LossScale.static(4))
    optimizer.apply(tensors([4.0], [7.0]), w)
    assert [value.tolist() for value in read(w)] == [[0.0], [7.0]]
    optimizer.apply(tensors([np.inf], [9.0]), w)
    assert [value.tolist() for value in read(w)] == [[0.0], [7.0]]


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_fit_skips_and_recovers(run_eagerly: bool) -> None:
    x, y = data()
    model = small_model()
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01), LossScale.dynamic(init_scale=2.0**40, growth_interval=4))
    model.compile(optimizer, "mse", run_eagerly=run_eagerly)
    assert model.optimizer is optimizer
    model.fit(x, y, batch_size=8, epochs=6, verbose=0)
    state = state_of(optimizer)
    assert state.steps == 48
    assert 15 < state.skipped < 48
    assert int(read([optimizer.iterations])[0]) == 48 - state.skipped
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_eager_and_compiled_fit_agree() -> None:
    x, y = data()
    trajectories = []
    for run_eagerly in (False, True):
        keras.utils.set_random_seed(0)
        model = small_model()
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.01), LossScale.dynamic(init_scale=2.0**40, growth_interval=3))
        model.compile(optimizer, "mse", run_eagerly=run_eagerly)
        model.fit(x, y, batch_size=8, epochs=3, verbose=0, shuffle=False)
        trajectories.append([(record.scale, record.skipped) for record in optimizer.recent_steps()])
    assert trajectories[0] == trajectories[1]
    assert len(trajectories[0]) == 24
