"""GradScaler as a drop-in for torch.amp.GradScaler: construction, scale, step, update, settings."""

from __future__ import annotations

import collections
import inspect

import pytest
import torch
from torch import nn

from polyamp import LossScale, LossScaleError, MisuseError
from polyamp_torch import GradScaler

EVENTS = "..X...XX..."


def run(scaler, optimizer, parameter, take_step, events=EVENTS):
    scales = []
    for event in events:
        scales.append(scaler.get_scale())
        take_step(scaler, optimizer, parameter, [float("inf") if event == "X" else 1.0] * parameter.numel())
    return scales


def test_is_a_torch_grad_scaler_with_its_signature():
    scaler = GradScaler("cpu")
    assert isinstance(scaler, torch.amp.GradScaler)
    ours, theirs = (list(inspect.signature(cls).parameters) for cls in (GradScaler, torch.amp.GradScaler))
    assert ours[: len(theirs)] == theirs
    assert (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (65536.0, 2.0, 0.5, 2000)
    assert scaler.is_enabled()


def test_overrides_every_public_method_of_torch():
    public = {name for name, _ in inspect.getmembers(torch.amp.GradScaler, inspect.isfunction) if not name.startswith("_")}
    inherited = {name for name in public if getattr(GradScaler, name) is getattr(torch.amp.GradScaler, name)}
    assert inherited == {"is_enabled"}


@pytest.mark.parametrize("fused", [False, True])
def test_trajectory_of_the_spec(fused, parameter, take_step):
    p = parameter(1.0, 2.0)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=3)
    optimizer = torch.optim.SGD([p], lr=0.0, fused=fused)
    assert run(scaler, optimizer, p, take_step) == [8, 8, 8, 4, 4, 4, 8, 4, 2, 2, 2]


@pytest.mark.parametrize("fused", [False, True])
def test_same_weights_and_scales_as_torch(fused, parameter, take_step):
    """Real gradients and real overflows: scale, skips and weights agree with torch.amp bit for bit."""
    results = []
    for cls, options in ((torch.amp.GradScaler, {"init_scale": 2.0**20, "growth_interval": 3}), (GradScaler, None)):
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(64, generator=generator))
        optimizer = torch.optim.AdamW([p], lr=0.01, fused=fused)
        scaler = cls("cpu", **options) if options else cls("cpu", loss_scale=LossScale.like("torch", init_scale=2.0**20, growth_interval=3))
        scales = []
        for _ in range(40):
            x = torch.randn(16, 64, generator=generator)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = x @ p[:, None]
            scaler.scale(output.float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        results.append((scales, p.detach().clone()))
    assert results[0][0] == results[1][0]
    assert len(set(results[0][0])) > 3
    assert torch.equal(results[0][1], results[1][1])


def test_floor_ceiling_and_hysteresis(parameter, take_step):
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    scaler = GradScaler("cpu", loss_scale=LossScale.dynamic(4.0, growth_interval=1, hysteresis=2, min_scale=2.0, max_scale=8.0))
    assert run(scaler, optimizer, p, take_step, "..XXXX.XX") == [4, 8, 8, 8, 4, 2, 2, 4, 4]
    assert scaler.get_scale() == 2.0


def test_static_scale_counts_and_skips_but_never_moves(parameter, take_step):
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu", loss_scale=LossScale.static(16.0))
    assert run(scaler, optimizer, p, take_step, "...X.X") == [16.0] * 6
    assert p.item() == 1.0 - 4
    assert scaler.state_dict()["skipped"] == 2


@pytest.mark.parametrize(("check", "expected"), [(True, 1.0), (False, float("-inf"))])
def test_no_scaling_with_and_without_the_check(check, expected, parameter, take_step):
    p = parameter(1.0)
    scaler = GradScaler("cpu", loss_scale=LossScale.none(check=check))
    loss = p.sum()
    assert scaler.scale(loss) is loss
    scaler.update(1.0)
    take_step(scaler, torch.optim.SGD([p], lr=1.0), p, [float("inf")])
    assert p.item() == expected
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict()["steps"] == 1


def test_scale_of_a_16_bit_loss_is_taken_in_float32():
    for dtype in (torch.float16, torch.bfloat16):
        scaled = GradScaler("cpu").scale(torch.tensor([2.0], dtype=dtype))
        assert scaled.dtype is torch.float32
        assert scaled.item() == 131072.0


def test_gradient_of_a_16_bit_loss_comes_back_in_its_dtype():
    loss = torch.tensor([2.0], dtype=torch.float16, requires_grad=True)
    GradScaler("cpu", init_scale=4.0).scale(loss).backward()
    assert loss.grad.dtype is torch.float16
    assert loss.grad.item() == 4.0


Pair = collections.namedtuple("Pair", "a b")


def test_scale_of_nested_containers():
    scaler = GradScaler("cpu", init_scale=4.0)
    one = torch.ones(())
    result = scaler.scale([one, (one, [one]), {"x": one}, Pair(one, one)])
    assert result == [4.0, (4.0, [4.0]), {"x": 4.0}, Pair(4.0, 4.0)]
    assert isinstance(result[3], Pair)
    assert list(scaler.scale(t for t in (one, one))) == [4.0, 4.0]


@pytest.mark.parametrize("wrong", [3.0, "loss", [None]])
def test_scale_refuses_what_is_not_a_tensor(wrong):
    with pytest.raises(MisuseError, match="expected a tensor"):
        GradScaler("cpu").scale(wrong)


def test_update_sets_the_scale_by_hand():
    scaler = GradScaler("cpu")
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0
    scaler.update(torch.tensor([16.0]))
    assert scaler.get_scale() == 16.0
    for wrong in (0.0, -1.0, float("inf"), float("nan"), 2.0**65):
        with pytest.raises(LossScaleError, match="expected a finite value"):
            scaler.update(wrong)
    with pytest.raises(LossScaleError, match="one number without gradient"):
        scaler.update(torch.ones(2))
    with pytest.raises(LossScaleError, match="one number without gradient"):
        scaler.update(torch.ones((), requires_grad=True))
    with pytest.raises(LossScaleError, match="scales by 1"):
        GradScaler("cpu", loss_scale=LossScale.none(check=True)).update(2.0)
    assert scaler.get_scale() == 16.0


def test_setters_validate_and_a_lowered_interval_still_grows(parameter, take_step):
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=10)
    run(scaler, optimizer, p, take_step, "....")
    scaler.set_growth_interval(2)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    run(scaler, optimizer, p, take_step, ".")
    assert scaler.get_scale() == 32.0
    run(scaler, optimizer, p, take_step, "X")
    assert scaler.get_scale() == 8.0
    for call, wrong in ((scaler.set_growth_interval, 0), (scaler.set_growth_factor, 1.0), (scaler.set_backoff_factor, 1.0)):
        with pytest.raises(LossScaleError):
            call(wrong)
    assert (scaler.get_growth_interval(), scaler.get_growth_factor(), scaler.get_backoff_factor()) == (2, 4.0, 0.25)


def test_disabled_passes_everything_through(parameter):
    p = parameter(1.0)
    scaler = GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD([p], lr=1.0)
    loss = p.sum() * torch.tensor(float("inf"))
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: torch.tensor(5.0)).item() == 5.0
    scaler.update()
    assert p.item() == float("-inf")
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled(), scaler.last_step) == (1.0, {}, False, None)
    scaler.load_state_dict({"anything": 1})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_explicit_cuda_without_cuda_warns_and_disables():
    with pytest.warns(UserWarning, match="CUDA is not available") as caught:
        scaler = GradScaler("cuda")
    assert caught[0].filename == __file__
    assert not scaler.is_enabled()


def test_the_default_device_is_this_machines(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    scaler = GradScaler()
    assert scaler.is_enabled()
    assert scaler._scale.device == torch.device("cpu")


def test_state_exists_from_the_start():
    scaler = GradScaler("cpu", init_scale=8.0)
    assert scaler._scale.item() == 8.0
    assert scaler._growth_tracker.dtype is torch.int32
    assert scaler._get_scale_async() is scaler._scale
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert scaler.get_scale() == 8.0


def test_construction_is_validated():
    with pytest.raises(LossScaleError, match="growth_factor"):
        GradScaler("cpu", growth_factor=1.0)
    with pytest.raises(LossScaleError, match="put them into loss_scale"):
        GradScaler("cpu", init_scale=8.0, loss_scale=LossScale.dynamic())
    with pytest.raises(LossScaleError, match="trace_every"):
        GradScaler("cpu", trace_every=0)
