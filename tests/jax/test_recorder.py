"""TraceRecorder: what a loop did, read late and without a wait, and the stall it must not sleep through."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyamp_jax as pj
from polyamp import LossScale, LossScaleStalled, MisuseError, Trace, TraceError

CONFIG = LossScale.dynamic(init_scale=8, growth_interval=2, max_consecutive_skips=3)
EVENTS = "..X...XX..."  # trajectory by hand: 8 8 16 8 8 16 16 8 4 4 8 8


@partial(jax.jit, donate_argnums=0)
def advance(state: pj.LossScaleState, finite: jax.Array) -> tuple[pj.LossScaleState, jax.Array]:
    return state.update(finite), state.scale


def run(recorder: pj.TraceRecorder, state: pj.LossScaleState, events: str = EVENTS) -> pj.LossScaleState:
    for event in events:
        state, loss = advance(state, jnp.array(event == "."))
        recorder.record(state, loss)
    return state


@pytest.mark.parametrize("every", [1, 3, 50])
def test_records_every_step_of_a_donated_loop(every: int) -> None:
    state = pj.init(CONFIG)
    recorder = pj.TraceRecorder(state, every=every)
    run(recorder, state)
    recorder.drain()
    records = recorder.trace.records
    assert [r.step for r in records] == list(range(11))
    assert [r.scale for r in records] == [8, 8, 16, 8, 8, 16, 16, 8, 4, 4, 8]
    assert [r.scale_after for r in records] == [8, 16, 8, 8, 16, 16, 8, 4, 4, 8, 8]
    assert recorder.trace.skips == (2, 6, 7)
    assert [r.loss for r in records] == [r.scale for r in records]
    assert all(r.reason is None for r in records)


def test_a_read_leaves_the_latest_step_alone() -> None:
    state = pj.init(CONFIG)
    recorder = pj.TraceRecorder(state, every=2)
    counts = []
    for event in EVENTS:
        state = run(recorder, state, event)
        counts.append(len(recorder.trace.records))
    assert counts == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10]


def test_writes_a_trace_file_with_header_and_footer(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(1.0), CONFIG)
    state = mp.init(jnp.zeros(1))
    with pj.TraceRecorder(state, path, policy=mp.policy, header={"seed": 7}) as recorder:
        for _ in range(3):
            state = mp.apply_gradients(state, jnp.ones(1))
            recorder.record(state)
    trace = Trace.read(path)
    assert trace.header["backend"] == "jax"
    assert trace.header["policy"] == str(mp.policy)
    assert trace.header["loss_scale"] == str(CONFIG)
    assert trace.header["seed"] == 7
    assert trace.footer == {"steps": 3, "skipped": 0, "final_scale": 16.0}
    assert [r.loss for r in trace.records] == [None] * 3
    with pytest.raises(TraceError, match="exists"):
        pj.TraceRecorder(state, path)


def test_a_crash_keeps_what_was_recorded_and_writes_no_footer(tmp_path: Path) -> None:
    path, state = tmp_path / "run.jsonl", pj.init(CONFIG)

    def crash() -> None:
        with pj.TraceRecorder(state, path) as recorder:
            run(recorder, jax.tree.map(jnp.copy, state), "..X")
            raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        crash()
    trace = Trace.read(path)
    assert len(trace.records) == 3
    assert trace.footer is None


@pytest.mark.parametrize(
    "grads, loss, reason, values",
    [
        ({"a": [1.0, np.inf], "b": [1.0]}, 1.0, "overflow", {"nonfinite/a": 1.0}),
        ({"a": [np.nan, np.inf], "b": [np.nan]}, 1.0, "overflow", {"nonfinite/a": 3.0, "nonfinite/b": 2.0}),
        ({"a": [1.0, 1.0], "b": [np.nan]}, 1.0, "nan", {"nonfinite/b": 2.0}),
        ({"a": [1.0, 1.0], "b": [np.inf]}, np.inf, "forward", {"nonfinite/b": 1.0}),
        ({"a": [1.0, 1.0], "b": [1.0]}, 1.0, None, {}),
    ],
)
def test_status_explains_a_skip(grads: Any, loss: float, reason: str | None, values: Any) -> None:
    grads = {k: jnp.array(v, jnp.float32) for k, v in grads.items()} | {"ids": None}
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(1.0), CONFIG)
    state = mp.init({"a": jnp.zeros(2), "b": jnp.zeros(1), "ids": jnp.arange(2)})
    recorder = pj.TraceRecorder(state)
    recorder.record(mp.apply_gradients(state, grads), jnp.float32(loss), pj.gradient_status(grads))
    recorder.drain()
    (record,) = recorder.trace.records
    assert (record.reason, record.skipped, record.values) == (reason, reason is not None, values)


def test_a_stall_is_raised_after_its_records_are_written(tmp_path: Path) -> None:
    path, state = tmp_path / "run.jsonl", pj.init(CONFIG)
    with pytest.raises(LossScaleStalled, match="3 steps in a row were skipped") as caught, pj.TraceRecorder(state, path, every=2) as recorder:
        run(recorder, state, "." + "X" * 20)
    assert "scale is 1" in str(caught.value)
    trace = Trace.read(path)
    assert len(trace.records) == 5  # the read after the fifth step sees the fourth: one step late, not sixteen
    assert trace.footer is None


def test_a_stall_names_the_tensors_and_a_forward_overflow() -> None:
    mp = pj.MixedPrecision("mixed_float16", optax.sgd(1.0), LossScale.static(2, max_consecutive_skips=1))
    state = mp.init({"a": jnp.zeros(1), "b": jnp.zeros(1)})
    grads = {"a": jnp.ones(1), "b": jnp.full(1, jnp.nan)}
    recorder = pj.TraceRecorder(state)
    recorder.record(mp.apply_gradients(state, grads), jnp.float32(np.nan), pj.gradient_status(grads))
    with pytest.raises(LossScaleStalled, match=r"non-finite gradients: b\. The loss itself is not finite"):
        recorder.drain()


def test_no_stall_where_it_is_turned_off() -> None:
    state = pj.init(LossScale.dynamic(max_consecutive_skips=None))
    recorder = pj.TraceRecorder(state, every=5)
    run(recorder, state, "X" * 300)
    recorder.drain()
    assert len(recorder.trace.skips) == 300


def test_continues_at_the_step_of_a_restored_state() -> None:
    first = run(pj.TraceRecorder(pj.init(CONFIG)), pj.init(CONFIG), "..X")
    state = pj.LossScaleState.from_state_dict(first.state_dict())
    recorder = pj.TraceRecorder(state)
    run(recorder, state, ".")
    recorder.drain()
    assert [(r.step, r.scale) for r in recorder.trace.records] == [(3, 8.0)]


def test_misuse_is_an_error_with_the_remedy() -> None:
    state = pj.init(CONFIG)
    recorder = pj.TraceRecorder(state)
    with pytest.raises(MisuseError, match="outside jit"):
        jax.jit(recorder.record)(state)
    recorder.record(state.update(True).update(True))
    with pytest.raises(MisuseError, match="once after every step"):
        recorder.drain()
    with pytest.raises(MisuseError, match="every=0"):
        pj.TraceRecorder(state, every=0)
