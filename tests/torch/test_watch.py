"""Stalls, and what the host may assume about a scale that it does not read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from polyamp import LossScale, LossScaleStalled
from polyamp_torch import GradScaler, lagged_read, scale_watch
from polyamp_torch import loss_scale_state as scale_state
from polyamp_torch.lagged_read import LaggedRead
from polyamp_torch.scale_watch import ScaleWatch


def stall(scaler, take_step, limit=1000, gradient=math.nan):
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    for number in range(limit):
        try:
            take_step(scaler, optimizer, p, [gradient])
        except LossScaleStalled as error:
            return number, error
    return None, None


def test_a_stall_is_raised_at_the_limit_and_not_before(take_step):
    scaler = GradScaler("cpu")
    number, error = stall(scaler, take_step, 170)
    assert number == 99
    assert "100 steps in a row" in str(error)
    assert scaler.get_scale() == 2.0**-24
    assert scaler.state_dict()["consecutive_skips"] == 100


def test_a_finite_step_in_between_is_no_stall(take_step, parameter):
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    scaler = GradScaler("cpu", loss_scale=LossScale.dynamic(max_consecutive_skips=2))
    for event in "X.X.X.":
        take_step(scaler, optimizer, p, [math.inf if event == "X" else 1.0])
    assert scaler.state_dict()["skipped"] == 3


def test_stalls_can_be_left_alone(take_step):
    assert stall(GradScaler("cpu", loss_scale=LossScale.dynamic(max_consecutive_skips=None)), take_step, 150) == (None, None)


@pytest.mark.parametrize("named", [False, True])
def test_the_error_names_the_parameters(named):
    model = nn.ModuleDict({"good": nn.Linear(1, 1, bias=False), "bad": nn.Linear(1, 1, bias=False)})
    optimizer = torch.optim.SGD(model.named_parameters() if named else model.parameters(), lr=1.0)
    scaler = GradScaler("cpu", loss_scale=LossScale.dynamic(max_consecutive_skips=1))
    x = torch.ones(1, 1)
    scaler.scale(model["good"](x).sum() + (model["bad"](x) * 1e38).sum()).backward()
    scaler.step(optimizer)
    name = "bad.weight" if named else r"param_groups\[0\]\['params'\]\[1\]"
    with pytest.raises(LossScaleStalled, match=f"non-finite gradients: {name}\\. Look for NaN"):
        scaler.update()


def test_the_error_tells_a_forward_overflow(take_step):
    _, error = stall(GradScaler("cpu", loss_scale=LossScale.dynamic(max_consecutive_skips=1)), take_step, gradient=math.inf)
    assert "The loss itself is not finite" in str(error)


class SlowEvent:
    """Stands in for a device event that completes when it has been asked `lag` times."""

    lag = 2

    def __init__(self, device):
        self.device = device
        self.left = 0

    def record(self):
        self.left = self.lag

    def query(self):
        self.left -= 1
        return self.left < 0


@pytest.fixture
def slow_device(monkeypatch):
    monkeypatch.setattr(torch, "Event", SlowEvent)
    monkeypatch.setattr(lagged_read, "_pinned_buffer", torch.zeros)
    return torch.device("cuda")


def test_on_the_cpu_a_read_is_immediate():
    read = LaggedRead(torch.device("cpu"), 2)
    assert read.poll() is None
    read.put(7, (torch.tensor(3, dtype=torch.int32), torch.tensor(0.5)))
    assert read.poll() == (7, [3.0, 0.5])
    assert read.poll() is None


def test_on_a_device_values_arrive_late_in_order_and_one_at_a_time(slow_device):
    read = LaggedRead(slow_device, 1)
    arrived = []
    for number in range(9):
        read.put(number, (torch.tensor(float(number)),))
        result = read.poll()
        if result is not None:
            arrived.append(result)
    assert arrived == [(0, [0.0]), (3, [3.0]), (6, [6.0])]


def test_a_stall_on_a_device_is_raised_late_and_not_missed(slow_device, monkeypatch, take_step):
    monkeypatch.setattr(scale_watch, "LaggedRead", lambda _, count: LaggedRead(slow_device, count))
    scaler = GradScaler("cpu", loss_scale=LossScale.dynamic(max_consecutive_skips=3))
    number, error = stall(scaler, take_step, 20)
    assert 2 < number < 10
    assert "steps in a row" in str(error)


class HostReads(TorchDispatchMode):
    """Counts reads of device values on the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("fused", "reads"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("gradient", [1.0, math.inf])
def test_reads_of_a_step_on_a_device(fused, reads, gradient, slow_device, monkeypatch, take_step):
    """Everything but the kernels runs as on an accelerator; a fused step reads nothing, another one its flag."""
    monkeypatch.setattr(scale_watch, "LaggedRead", lambda _, count: LaggedRead(slow_device, count))
    scaler = GradScaler("cpu")
    scaler._reads_are_free = False
    p = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
    for _ in range(5):
        with HostReads() as host:
            take_step(scaler, optimizer, p, [gradient])
        assert host.count == reads


@given(
    finite_steps=st.lists(st.booleans(), max_size=60),
    lag=st.integers(0, 9),
    backoff=st.floats(min_value=0.0625, max_value=0.9375),
    init=st.floats(min_value=0.5, max_value=64, width=32),
)
def test_the_bound_never_exceeds_the_scale(finite_steps, lag, backoff, init):
    config = LossScale.dynamic(init, growth_interval=2, backoff_factor=backoff, max_consecutive_skips=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Event", SlowEvent)
        patch.setattr(lagged_read, "_pinned_buffer", torch.zeros)
        patch.setattr(SlowEvent, "lag", lag)
        watch = ScaleWatch(config, init, torch.device("cuda"))
        state, rules = scale_state.place(config.init(), "cpu"), scale_state.rules(config, "cpu")
        for finite in finite_steps:
            state = scale_state.update(state, rules, torch.tensor(0.0 if finite else 1.0))
            assert watch.follow(state) is None
            assert watch.may_overflow or state.scale.item() >= 1.0
            assert watch._bound <= state.scale.item()


def test_the_second_pass_is_left_out_while_the_scale_is_large():
    config = LossScale.dynamic(2.0**16)
    watch = ScaleWatch(config, 2.0**16, torch.device("cpu"))
    assert not watch.may_overflow
    assert ScaleWatch(config, 0.5, torch.device("cpu")).may_overflow
