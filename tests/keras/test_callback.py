"""MixedPrecision: logs, trace, warnings, stalls; and nothing of training changes."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from polyamp import LossScale, LossScaleError, LossScaleStalled, MisuseError, Trace, TraceError
from polyamp_keras import LossScaleOptimizer, MixedPrecision

from .models import data, read, same, small_model, state_of

SAWTOOTH = LossScale.dynamic(init_scale=2.0**30, growth_interval=3)


def compiled(config: LossScale = SAWTOOTH, **kwargs: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = small_model()
    model.compile(LossScaleOptimizer(keras.optimizers.Adam(0.01), config, **kwargs), "mse")
    return model


def fit(model: keras.Model, *callbacks: keras.callbacks.Callback, epochs: int = 3, **kwargs: Any) -> keras.callbacks.History:
    x, y = data()
    return model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks), **kwargs)


def test_logs_reach_history_and_loggers(tmp_path: Path) -> None:
    model = compiled()
    history = fit(model, MixedPrecision(), keras.callbacks.CSVLogger(tmp_path / "log.csv"), validation_data=data(16)).history
    records = model.optimizer.recent_steps()
    ends = [records[8 * epoch - 1] for epoch in (1, 2, 3)]
    skips = [[r.skipped for r in records[: 8 * epoch]].count(True) for epoch in (1, 2, 3)]
    assert history["loss_scale"] == [end.scale_after for end in ends]
    assert history["skipped_steps"] == skips
    assert history["skip_rate"] == [count / 8 for count in np.diff([0, *skips])]
    assert skips[-1] > 0
    with (tmp_path / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss_scale"]) for row in rows] == history["loss_scale"]
    assert [int(row["skipped_steps"]) for row in rows] == skips


def test_the_progress_bar_shows_the_scale(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = data()
    compiled(LossScale.static(1024)).fit(x, y, batch_size=8, epochs=1, verbose=2, callbacks=[MixedPrecision()])
    assert "loss_scale: 1024.0000" in capsys.readouterr().out


@pytest.mark.parametrize("drain_every", [None, 1, 3])
def test_trace_of_fit_equals_step_wise_training(tmp_path: Path, drain_every: int | None, backend: str) -> None:
    model = compiled()
    fit(model, MixedPrecision(tmp_path / "fit.jsonl", header={"seed": 0, "workload": "small"}, drain_every=drain_every))
    trace = Trace.read(tmp_path / "fit.jsonl")

    x, y = data()
    other = compiled()
    stepwise = []
    for step in range(24):
        before = state_of(other.optimizer)
        rows = slice(step % 8 * 8, step % 8 * 8 + 8)
        other.train_on_batch(x[rows], y[rows])
        after = state_of(other.optimizer)
        stepwise.append((step, before.scale, after.scale, after.skipped > before.skipped))
    assert [(r.step, r.scale, r.scale_after, r.skipped) for r in trace.records] == stepwise
    assert same(model.get_weights(), other.get_weights())
    assert trace.skips
    assert trace.footer == {"steps": 24, "skipped": len(trace.skips), "final_scale": trace.records[-1].scale_after}
    assert trace.header["backend"] == f"keras-{backend}"
    assert trace.header["versions"]["keras"] == keras.__version__
    assert (trace.header["workload"], trace.header["seed"], trace.header["loss_scale"]) == ("small", 0, str(SAWTOOTH))
    assert trace.header["layer_policies"] == {"float32": 1, "mixed_float16": 1}


def test_training_is_the_same_without_it() -> None:
    models = [compiled(), compiled()]
    fit(models[0])
    fit(models[1], MixedPrecision(drain_every=1))
    assert same(models[0].get_weights(), models[1].get_weights())
    assert models[0].optimizer.state_dict() == models[1].optimizer.state_dict()


@pytest.mark.only("tensorflow", "jax")
def test_trace_with_many_steps_in_one_execution(tmp_path: Path) -> None:
    x, y = data()
    model = compiled()
    model.compile(model.optimizer, "mse", steps_per_execution=4)
    model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[MixedPrecision(tmp_path / "t.jsonl", drain_every=4)])
    assert [r.step for r in Trace.read(tmp_path / "t.jsonl").records] == list(range(48))
    model.compile(model.optimizer, "mse", steps_per_execution=1024)
    with pytest.raises(MisuseError, match="ring_capacity="):
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[MixedPrecision()])


def test_a_long_epoch_is_drained_before_the_ring_overruns(tmp_path: Path) -> None:
    model = compiled(ring_capacity=4)
    fit(model, MixedPrecision(tmp_path / "t.jsonl"), epochs=2)
    assert [r.step for r in Trace.read(tmp_path / "t.jsonl").records] == list(range(16))


def test_a_gap_is_reported(tmp_path: Path) -> None:
    class Reload(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 5:
                optimizer = self.model.optimizer
                optimizer.load_state_dict(optimizer.state_dict())  # clears the ring, as loading a checkpoint does

    model = compiled()
    with pytest.warns(UserWarning, match="lacks 5 steps before step 8"):
        fit(model, MixedPrecision(tmp_path / "t.jsonl"), Reload(), epochs=1)
    assert [r.step for r in Trace.read(tmp_path / "t.jsonl").records] == [5, 6, 7]


def test_a_second_fit_continues_the_count(tmp_path: Path) -> None:
    model = compiled()
    fit(model, MixedPrecision(tmp_path / "a.jsonl"), epochs=1)
    fit(model, MixedPrecision(tmp_path / "b.jsonl"), epochs=1)
    trace = Trace.read(tmp_path / "b.jsonl")
    assert trace.header["first_step"] == 8
    assert [r.step for r in trace.records] == list(range(8, 16))


def test_an_existing_trace_stops_training_before_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("precious\n")
    model = compiled()
    before = model.get_weights()
    with pytest.raises(TraceError, match="exists and is left as it is"):
        fit(model, MixedPrecision(path))
    assert path.read_text() == "precious\n"
    assert same(before, model.get_weights())
    fit(model, MixedPrecision(path, overwrite=True), epochs=1)
    assert len(Trace.read(path).records) == 8


def test_a_trace_needs_our_optimizer(tmp_path: Path) -> None:
    model = small_model("float32")
    model.compile("sgd", "mse")
    with pytest.raises(MisuseError, match=r"LossScale\.none\(\)"):
        fit(model, MixedPrecision(tmp_path / "t.jsonl"))
    assert not (tmp_path / "t.jsonl").exists()


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda: keras.optimizers.SGD(0.01), "does not scale the loss"),
        (lambda: keras.optimizers.SGD(0.01, loss_scale_factor=8.0), "without checking the gradients"),
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)), "stock LossScaleOptimizer"),
    ],
)
def test_float16_without_our_scaling_warns_once_with_the_remedy(optimizer: Any, words: str) -> None:
    model = small_model()
    model.compile(optimizer(), "mse")
    callback = MixedPrecision()
    with pytest.warns(UserWarning, match=words) as caught:
        fit(model, callback, epochs=1)
    assert "polyamp_keras.LossScaleOptimizer(keras.optimizers.SGD(...)" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fit(model, callback, epochs=1)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_formats_with_range_need_no_scaling(policy: str) -> None:
    model = small_model(policy)
    model.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "loss_scale" not in fit(model, MixedPrecision(), epochs=1).history


def test_the_stock_optimizer_still_shows_its_scale() -> None:
    model = small_model()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=512.0), "mse")
    with pytest.warns(UserWarning, match="stock"):
        assert fit(model, MixedPrecision(), epochs=1).history["loss_scale"] == [512.0]


def stalling(limit: int = 4) -> keras.Model:
    model = compiled(LossScale.dynamic(max_consecutive_skips=limit))
    model.layers[0].kernel.assign(np.full(model.layers[0].kernel.shape, np.nan, "float32"))
    return model


def test_a_stall_raises_and_the_trace_keeps_its_steps(tmp_path: Path) -> None:
    model = stalling()
    with pytest.raises(LossScaleStalled, match="4 steps in a row"):
        fit(model, MixedPrecision(tmp_path / "t.jsonl"))
    trace = Trace.read(tmp_path / "t.jsonl")
    assert (len(trace.records), trace.footer) == (4, None)
    assert {r.reason for r in trace.records} == {"nan"}


def test_a_stall_stops_training() -> None:
    model = stalling()
    with pytest.warns(UserWarning, match="training stops"):
        history = fit(model, MixedPrecision(on_stall="stop"))
    assert history.epoch == [0]
    assert state_of(model.optimizer).steps < 8


def test_a_stall_warns_once_and_goes_on() -> None:
    model = stalling()
    with pytest.warns(UserWarning, match="steps in a row were skipped") as caught:
        fit(model, MixedPrecision(on_stall="warn"))
    assert len([w for w in caught if "in a row" in str(w.message)]) == 1
    assert state_of(model.optimizer).steps == 24


def test_a_stall_at_the_end_of_an_epoch_names_the_forward_pass() -> None:
    model = stalling(8)
    with pytest.raises(LossScaleStalled, match="The loss itself is not finite"):
        fit(model, MixedPrecision())


@pytest.mark.parametrize("arguments", [{"on_stall": "ignore"}, {"drain_every": 0}, {"drain_every": True}])
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(LossScaleError, match=next(iter(arguments))):
        MixedPrecision(**arguments)


def test_batches_stay_asynchronous(backend: str) -> None:
    ours = keras.callbacks.CallbackList([MixedPrecision()])

    class AfterBatch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            pass

    assert ours._async_train == keras.callbacks.CallbackList([])._async_train
    assert not keras.callbacks.CallbackList([AfterBatch()])._async_train  # why no hook of ours runs after a batch
    assert ours._async_train == (backend != "tensorflow")  # Keras dispatches nothing asynchronously there


def test_a_restored_counter_between_hooks(tmp_path: Path) -> None:
    model = compiled()
    fit(model, epochs=2)
    saved = model.optimizer.state_dict()

    class Restore(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.model.optimizer.load_state_dict({**saved, "steps": 100})

    fit(model, MixedPrecision(tmp_path / "t.jsonl"), Restore(), epochs=1)
    assert [r.step for r in Trace.read(tmp_path / "t.jsonl").records] == list(range(100, 108))


def test_cached_optimizer_reads_true_values_at_epoch_end() -> None:
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append((logs["loss_scale"], float(read([optimizer.dynamic_scale])[0])))

    model = compiled()
    optimizer = model.optimizer
    fit(model, MixedPrecision(), Watch())
    assert [a for a, _ in seen] == [b for _, b in seen]
