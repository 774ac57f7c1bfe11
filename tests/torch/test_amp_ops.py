"""Check and unscale: the private kernel and the public operations agree bit for bit, and the verdict covers raw and unscaled values."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polyamp_torch
from polyamp_torch import _amp_ops
from polyamp_torch._amp_ops import check_and_unscale_, check_and_unscale_with_public_ops_, inverse

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BAD = (math.inf, -math.inf, math.nan)


def run(function, tensors, inv_scale, *, recheck, found=0.0):
    copies = [t.clone() for t in tensors]
    flag = torch.tensor(found)
    if function is check_and_unscale_:
        function(copies, flag, torch.tensor(inv_scale), recheck=recheck)
    else:
        function(copies, flag, torch.tensor(inv_scale), recheck)
    return copies, flag


def bits(tensor):
    """Bit pattern, with one pattern for all NaN."""
    same_nan = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return same_nan.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


def test_the_kernel_exists_in_this_torch():
    assert _amp_ops._KERNEL is torch._amp_foreach_non_finite_check_and_unscale_


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("function", [check_and_unscale_, check_and_unscale_with_public_ops_])
def test_a_bad_value_in_any_position_raises_the_flag(function, bad, dtype):
    for which in range(3):
        for position in range(67):  # beyond one vector register and its remainder
            tensors = [torch.ones(67, dtype=dtype) for _ in range(3)]
            tensors[which][position] = bad
            _, flag = run(function, tensors, 0.5, recheck=False)
            assert flag.item() == 1.0, (which, position)


@pytest.mark.parametrize("function", [check_and_unscale_, check_and_unscale_with_public_ops_])
def test_the_flag_is_one_or_zero_and_stays_up(function):
    tensors = [torch.tensor([math.inf, math.nan]), torch.tensor([-math.inf])]
    _, flag = run(function, tensors, 1.0, recheck=True)
    assert flag.item() == 1.0
    assert flag.dtype is torch.float32
    assert flag.shape == ()
    _, kept = run(function, [torch.ones(2)], 1.0, recheck=True, found=1.0)
    assert kept.item() == 1.0
    _, clear = run(function, [torch.ones(2)], 1.0, recheck=True)
    assert clear.item() == 0.0


@pytest.mark.parametrize("function", [check_and_unscale_, check_and_unscale_with_public_ops_])
def test_a_finite_value_that_unscales_to_infinity_is_found_on_recheck(function):
    values, flag = run(function, [torch.tensor([1e38])], 1e3, recheck=True)
    assert values[0].item() == math.inf
    assert flag.item() == 1.0
    _, unseen = run(function, [torch.tensor([1e38])], 1e3, recheck=False)
    assert unseen.item() == 0.0


def test_recheck_does_not_multiply_twice():
    values, _ = run(check_and_unscale_, [torch.tensor([8.0])], 0.5, recheck=True)
    assert values[0].item() == 4.0


@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    inv_scale=st.floats(min_value=2.0**-64, max_value=2.0**24, width=32),
    recheck=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_kernel_and_public_operations_agree(values, inv_scale, recheck, dtype):
    tensors = [torch.tensor(values).to(dtype), torch.ones(3, 5, dtype=dtype).T]
    fast, fast_flag = run(check_and_unscale_, tensors, inv_scale, recheck=recheck)
    slow, slow_flag = run(check_and_unscale_with_public_ops_, tensors, inv_scale, recheck=recheck)
    assert fast_flag.item() == slow_flag.item()
    for left, right in zip(fast, slow, strict=True):
        assert torch.equal(bits(left), bits(right))


def test_a_device_without_the_kernel_takes_the_public_operations(monkeypatch):
    def missing(*_):
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(_amp_ops, "_KERNEL", missing)
    values, flag = run(check_and_unscale_, [torch.tensor([8.0, math.inf])], 0.5, recheck=False)
    assert values[0].tolist() == [4.0, math.inf]
    assert flag.item() == 1.0


def test_a_torch_without_the_kernel_takes_the_public_operations(monkeypatch):
    monkeypatch.setattr(_amp_ops, "_KERNEL", None)
    values, flag = run(check_and_unscale_, [torch.tensor([8.0])], 0.5, recheck=True)
    assert values[0].item() == 4.0
    assert flag.item() == 0.0


@given(scale=st.floats(min_value=2.0**-100, max_value=2.0**100, width=32))
def test_inverse_is_correctly_rounded(scale):
    exact = torch.tensor(1.0 / scale, dtype=torch.float64).float()
    assert inverse(torch.tensor(scale)).item() == exact.item()


def test_private_kernels_are_named_in_one_module_only():
    root = Path(polyamp_torch.__file__).parent
    users = {path.name for path in root.rglob("*.py") if "_amp_foreach" in path.read_text() or "_amp_update" in path.read_text()}
    assert users == {"_amp_ops.py"}
