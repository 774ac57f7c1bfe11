"""One step as a transaction: verdicts, skips, several optimizers, fused kernels, misuse."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from polyamp import LossScale, MisuseError
from polyamp_torch import GradScaler

FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def backward(scaler, parameter, gradient):
    scaler.scale((parameter * torch.tensor(gradient)).sum()).backward()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("cls", FUSED)
def test_a_skipped_step_moves_nothing(cls, bad, fused, parameter, take_step):
    p = parameter(1.0, 2.0)
    optimizer = cls([p], lr=0.5, fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0)
    take_step(scaler, optimizer, p, [1.0, 1.0])
    weights = p.detach().clone()
    slots = {k: v.clone() for k, v in optimizer.state[p].items() if v is not None}
    take_step(scaler, optimizer, p, [1.0, bad])
    assert torch.equal(p, weights)
    assert all(torch.equal(optimizer.state[p][k], v) for k, v in slots.items())
    assert scaler.last_step.skipped
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("fused", [False, True])
def test_a_scale_below_one_that_unscales_to_infinity_skips(fused, parameter):
    p = parameter(1.0)
    optimizer = torch.optim.AdamW([p], fused=fused)
    scaler = GradScaler("cpu", loss_scale=LossScale.dynamic(1e-10, min_scale=2.0**-60))
    scaler.scale(())
    p.grad = torch.tensor([1e30])
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == 1.0
    assert scaler.last_step.skipped
    assert scaler.get_scale() == pytest.approx(0.5e-10)


@pytest.mark.parametrize("fused", [False, True])
def test_large_finite_gradients_are_no_false_alarm(fused, parameter):
    p = parameter(*([1.0] * 64))
    optimizer = torch.optim.SGD([p], lr=0.0, fused=fused)
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.scale(())
    p.grad = torch.full((64,), torch.finfo(torch.float32).max)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.last_step.skipped


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_without_gradients_counts_as_finite(fused, parameter):
    p = parameter(1.0)
    optimizer = torch.optim.AdamW([p], fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == 1.0
    assert (scaler.last_step.skipped, scaler.last_step.reason) == (False, "no_gradients")
    assert scaler.get_scale() == 16.0


def test_unscale_then_clip_then_step(parameter):
    p = parameter(0.0, 0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1024.0)
    backward(scaler, p, [3.0, 4.0])
    scaler.unscale_(optimizer)
    assert p.grad.tolist() == [3.0, 4.0]
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    scaler.step(optimizer)
    assert p.detach().norm().item() == pytest.approx(1.0, rel=1e-5)


def test_a_window_of_several_backwards_has_one_scale_and_one_verdict(parameter):
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    for window in ([1.0, math.inf], [2.0, 4.0]):
        optimizer.zero_grad()
        for gradient in window:
            backward(scaler, p, [gradient / 2])
        scaler.step(optimizer)
        scaler.update()
    assert p.item() == -3.0
    assert scaler.state_dict()["steps"] == 2


def test_step_passes_arguments_and_returns_the_result(parameter):
    p = parameter(1.0)

    class Recording(torch.optim.SGD):
        def step(self, *args, **kwargs):
            self.seen = (args, kwargs)
            return 7.0

    optimizer = Recording([p], lr=1.0)
    scaler = GradScaler("cpu")
    backward(scaler, p, [1.0])
    assert scaler.step(optimizer, None, flag=2) == 7.0
    assert optimizer.seen == ((None,), {"flag": 2})


@pytest.mark.parametrize("fused", [(False, False), (True, False), (True, True)])
def test_two_optimizers_skip_on_their_own_flag_and_update_once(fused, parameter):
    a, b = parameter(1.0), parameter(1.0)
    optimizers = [torch.optim.SGD([p], lr=1.0, fused=f) for p, f in zip((a, b), fused, strict=True)]
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, a, [1.0])
    backward(scaler, b, [math.inf])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert (a.item(), b.item(), scaler.get_scale()) == (0.0, 1.0, 4.0)
    record = scaler.last_step
    assert record.skipped
    assert record.values == {"optimizers": 2.0, "skipped_optimizers": 1.0}


def test_two_optimizers_grow_the_scale_once_an_iteration(parameter):
    a, b = parameter(1.0), parameter(1.0)
    optimizers = [torch.optim.SGD([p], lr=0.0) for p in (a, b)]
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=4)
    scales = []
    for _ in range(4):
        for p, optimizer in zip((a, b), optimizers, strict=True):
            backward(scaler, p, [1.0])
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8, 8, 8, 16]


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_shared_parameter_is_unscaled_once(first, second, parameter):
    p = parameter(0.0)
    optimizers = [torch.optim.SGD([p], lr=1.0, fused=fused) for fused in (first, second)]
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, p, [1.0])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert p.item() == -2.0


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_a_shared_parameter_of_a_skipped_optimizer_is_unscaled_for_the_other(first, second, parameter):
    shared, own = parameter(0.0), parameter(0.0)
    skipped = torch.optim.SGD([shared, own], lr=1.0, fused=first)
    taken = torch.optim.SGD([shared], lr=1.0, fused=second)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, shared, [1.0])
    backward(scaler, own, [math.inf])
    scaler.step(skipped)
    scaler.step(taken)
    scaler.update()
    assert (shared.item(), own.item()) == (-1.0, 0.0)


def test_a_shared_parameter_makes_both_optimizers_skip(parameter):
    p = parameter(0.0)
    optimizers = [torch.optim.SGD([p], lr=1.0) for _ in range(2)]
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, p, [math.inf])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert p.item() == 0.0
    assert scaler.last_step.values["skipped_optimizers"] == 2


def test_new_gradients_after_a_step_are_scaled_again(parameter):
    """Discriminator and generator in one iteration, with a parameter that both hold."""
    p = parameter(0.0)
    first, second = (torch.optim.SGD([p], lr=1.0) for _ in range(2))
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, p, [1.0])
    scaler.step(first)
    first.zero_grad()
    backward(scaler, p, [1.0])
    scaler.step(second)
    assert p.item() == -2.0


@pytest.mark.parametrize("gradients", [[[1.0, 1.0], [2.0]], [[1.0, math.inf], [2.0]], [[3e38, 3e38], [1.0]]])
def test_sparse_gradients_are_coalesced_before_the_verdict(gradients):
    p = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(())
    values = torch.tensor([*gradients[0], *gradients[1]])
    p.grad = torch.sparse_coo_tensor([[1, 1, 3]], values, (4,), check_invariants=True)
    scaler.step(optimizer)
    scaler.update()
    finite = bool((values[0] + values[1]).isfinite())
    assert scaler.last_step.skipped is not finite
    assert p.tolist() == ([0.0, -1.0, 0.0, -1.0] if finite else [0.0] * 4)


@pytest.mark.parametrize("bad", [None, complex(0.0, math.inf), complex(math.nan, 0.0)])
def test_complex_gradients(bad):
    p = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(())
    p.grad = torch.tensor([2 + 4j, bad or 0j])
    scaler.step(optimizer)
    scaler.update()
    assert scaler.last_step.skipped is (bad is not None)
    assert p[0].item() == (0j if bad else -1 - 2j)


def test_gradients_of_several_dtypes_share_one_flag():
    parameters = [nn.Parameter(torch.zeros(1, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float64)]
    for bad in range(3):
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler = GradScaler("cpu", init_scale=2.0)
        scaler.scale(())
        for number, p in enumerate(parameters):
            p.grad = torch.full_like(p, math.inf if number == bad else 2.0)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step.skipped
        assert all(p.item() == 0.0 for p in parameters)


def test_fused_attributes_never_stay_behind(parameter):
    p = parameter(1.0)

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("no")

    optimizer = Failing([p], lr=1.0, fused=True)
    scaler = GradScaler("cpu")
    backward(scaler, p, [1.0])
    with pytest.raises(ValueError, match="no"):
        scaler.step(optimizer)
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


def test_fused_kernel_gets_no_scale_after_unscale(parameter):
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0, fused=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, p, [1.0])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert p.item() == -1.0


def test_fused_kernel_takes_a_scale_of_its_own_as_a_factor(parameter):
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=1.0, fused=True)
    optimizer.grad_scale = torch.tensor(4.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, p, [1.0])
    scaler.step(optimizer)
    assert p.item() == -0.25


def test_fused_kernels_of_torch_write_unscaled_gradients_back_unless_they_skip(parameter):
    """The scaler relies on it for parameters that two optimizers share."""
    for cls in FUSED:
        for flag, left in ((0.0, 1.0), (1.0, 8.0)):
            p = parameter(0.0)
            p.grad = torch.tensor([8.0])
            optimizer = cls([p], fused=True)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(flag)
            optimizer.step()
            assert p.grad.item() == left, cls


def test_an_optimizer_that_asks_for_the_scaler_gets_it(parameter):
    p = parameter(1.0)

    class Own(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            flags = grad_scaler._check_inf_per_device(self)
            assert set(flags) == {torch.device("cpu")}
            self.seen = (grad_scaler._get_scale_async().item(), grad_scaler._found_inf_per_device(self)[torch.device("cpu")].item())

    optimizer = Own([p], lr=1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    backward(scaler, p, [math.inf])
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.seen == (8.0, 1.0)
    assert scaler.get_scale() == 4.0


def misuse(parameter):
    p = parameter(1.0)
    scaler = GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    backward(scaler, p, [1.0])
    return scaler, optimizer, p


def test_unscale_twice(parameter):
    scaler, optimizer, p = misuse(parameter)
    scaler.unscale_(optimizer)
    with pytest.raises(MisuseError, match=r"unscale_\(\) after unscale_\(\)"):
        scaler.unscale_(optimizer)
    assert p.grad.item() == 1.0


def test_unscale_after_step(parameter):
    scaler, optimizer, p = misuse(parameter)
    scaler.step(optimizer)
    with pytest.raises(MisuseError, match=r"unscale_\(\) after step\(\)"):
        scaler.unscale_(optimizer)
    assert p.grad.item() == 1.0


def test_step_twice(parameter):
    scaler, optimizer, p = misuse(parameter)
    scaler.step(optimizer)
    with pytest.raises(MisuseError, match="twice"):
        scaler.step(optimizer)
    assert p.item() == 0.0


def test_step_or_unscale_without_scale(parameter):
    scaler, optimizer, p = misuse(parameter)
    scaler.step(optimizer)
    scaler.update()
    p.grad = torch.tensor([8.0])
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(MisuseError, match="without scale"):
            call(optimizer)
    assert p.grad.item() == 8.0
    scaler.scale(())
    scaler.step(optimizer)


def test_scale_after_unscale(parameter):
    scaler, optimizer, p = misuse(parameter)
    scaler.unscale_(optimizer)
    with pytest.raises(MisuseError, match=r"scale\(\) after unscale_\(\)"):
        scaler.scale(p.sum())


def test_update_without_a_verdict(parameter):
    scaler, _, _ = misuse(parameter)
    with pytest.raises(MisuseError, match="without a verdict"):
        scaler.update()
    assert scaler.state_dict()["steps"] == 0


@pytest.mark.parametrize("form", ["positional", "keyword"])
def test_closures_are_refused(form, parameter):
    scaler, optimizer, _ = misuse(parameter)
    with pytest.raises(MisuseError, match="closure"):
        scaler.step(optimizer, *([lambda: 0.0] if form == "positional" else []), **({"closure": lambda: 0.0} if form == "keyword" else {}))
    scaler.step(optimizer)


def test_float16_gradients_are_refused_in_place():
    p = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    scaler = GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    with pytest.raises(MisuseError, match="float16 gradients"):
        scaler.step(torch.optim.SGD([p], lr=1.0))
    assert p.grad.item() == math.inf
