"""What a scaler tells about its steps, and the trace that it writes."""

from __future__ import annotations

import gc
import math
import pickle

import pytest
import torch
from torch import nn

from polyamp import LossScale, StepRecord, Trace, TraceError
from polyamp.trace import TraceWriter
from polyamp_torch import GradScaler
from polyamp_torch.step_records import resolve

EVENTS = "..X...XX..."


def train(scaler, take_step, events=EVENTS):
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.0)
    for event in events:
        take_step(scaler, optimizer, p, [math.inf if event == "X" else 1.0])


def expected(events=EVENTS):
    config = LossScale.dynamic(8.0, growth_interval=3)
    state, records = config.init(), []
    for number, event in enumerate(events):
        after = config.update(state, event == ".")
        skipped = event == "X"
        records.append(
            StepRecord(
                step=number,
                scale=state.scale,
                scale_after=after.scale,
                skipped=skipped,
                reason="forward" if skipped else None,
                loss=math.inf if skipped else 1.0,
            )
        )
        state = after
    return tuple(records)


def test_last_step_follows_every_step(take_step):
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3)
    assert scaler.last_step is None
    records = []
    for event in EVENTS:
        train(scaler, take_step, event)
        records.append(scaler.last_step)
    assert tuple(records) == expected()


@pytest.mark.parametrize("every", [1, 4, 64])
def test_trace_holds_every_step(every, take_step, tmp_path):
    path = tmp_path / "trace.jsonl"
    with GradScaler("cpu", init_scale=8.0, growth_interval=3, trace=path, trace_every=every) as scaler:
        train(scaler, take_step)
    trace = Trace.read(path)
    assert trace.records == expected()
    assert trace.header["backend"] == "torch"
    assert trace.header["versions"] == {"torch": torch.__version__}
    assert trace.header["loss_scale"] == str(LossScale.dynamic(8.0, growth_interval=3))
    assert trace.footer == {"steps": 11, "skipped": 3, "final_scale": 4.0}


def test_records_are_drained_every_k_steps_and_by_flush(take_step, tmp_path):
    path = tmp_path / "trace.jsonl"
    scaler = GradScaler("cpu", trace=path, trace_every=4)
    train(scaler, take_step, "......")
    assert len(Trace.read(path).records) == 4
    scaler.flush()
    assert len(Trace.read(path).records) == 6
    assert Trace.read(path).footer is None
    scaler.close()
    assert Trace.read(path).footer["steps"] == 6
    train(scaler, take_step, ".")
    scaler.close()
    assert len(Trace.read(path).records) == 6


def test_a_run_that_raises_leaves_its_steps_and_no_footer(take_step, tmp_path):
    path = tmp_path / "trace.jsonl"

    def crash():
        with GradScaler("cpu", trace=path) as scaler:
            train(scaler, take_step, "..")
            raise KeyError("stop")

    with pytest.raises(KeyError):
        crash()
    trace = Trace.read(path)
    assert len(trace.records) == 2
    assert trace.footer is None


def test_a_scaler_that_is_dropped_loses_no_step(take_step, tmp_path):
    path = tmp_path / "run.jsonl"
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3, trace=path)
    train(scaler, take_step)
    assert Trace.read(path).records == ()  # all steps are still on the device
    del scaler
    gc.collect()
    trace = Trace.read(path)
    assert trace.records == expected()
    assert trace.footer is None


def test_a_writer_of_the_callers_own(take_step, tmp_path):
    writer = TraceWriter(tmp_path / "trace.jsonl", {"run": "mine"})
    with GradScaler("cpu", trace=writer) as scaler:
        train(scaler, take_step, ".")
    assert Trace.read(writer.path).header == {"run": "mine"}


def test_an_existing_trace_is_left_as_it_is(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("precious")
    with pytest.raises(TraceError, match="exists"):
        GradScaler("cpu", trace=path)
    assert path.read_text() == "precious"


def test_a_disabled_scaler_writes_no_trace(tmp_path):
    with GradScaler("cpu", enabled=False, trace=tmp_path / "trace.jsonl"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("loss", "gradient", "reason"),
    [
        (1.0, [1.0, 2.0], None),
        (1.0, [1.0, math.inf], "overflow"),
        (1.0, [math.nan, math.inf], "overflow"),
        (1.0, [math.nan, 1.0], "nan"),
        (math.inf, [math.inf, 1.0], "forward"),
        (math.nan, [math.nan, 1.0], "forward"),
        (math.inf, [1.0, 2.0], None),
    ],
)
def test_reasons(fused, loss, gradient, reason, parameter):
    p = parameter(1.0, 2.0)
    optimizer = torch.optim.SGD([p], lr=0.0, fused=fused)
    scaler = GradScaler("cpu")
    scaler.scale(torch.tensor(loss))
    p.grad = torch.tensor(gradient)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.reason == reason
    assert scaler.last_step.skipped is (not all(map(math.isfinite, gradient)))
    assert scaler.last_step.loss == loss or math.isnan(loss)


def test_several_losses_are_not_added_up(parameter):
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    scaler = GradScaler("cpu")
    scaler.scale([p.sum(), p.sum()])[0].backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.loss is None


def test_a_record_stays_what_it_was_after_later_steps(take_step):
    scaler = GradScaler("cpu", init_scale=8.0)
    train(scaler, take_step, "X")
    pending = scaler._last
    train(scaler, take_step, "X")
    assert (resolve([pending])[0].scale, resolve([pending])[0].scale_after) == (8.0, 4.0)
    assert resolve([]) == []


def test_pickling_leaves_the_trace_behind(take_step, tmp_path):
    with GradScaler("cpu", trace=tmp_path / "trace.jsonl") as scaler:
        other = pickle.loads(pickle.dumps(scaler))
        train(other, take_step, "...")
        other.close()
        train(scaler, take_step, ".")
    assert len(Trace.read(tmp_path / "trace.jsonl").records) == 1
