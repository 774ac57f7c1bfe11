"""autocast: values that 16 bits get wrong, what is left alone, nesting, overrides, compilation."""

from __future__ import annotations

import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polyamp import Policy, PolicyError, UnsupportedError
from polyamp_torch import autocast

X = torch.linspace(0.25, 0.75, 16).reshape(4, 4)


def half(*values):
    return torch.tensor(values, dtype=torch.float16)


WRONG_IN_HALF = {
    "sum": (lambda: half(6e4, 6e4, -6e4).sum(), 60000.0),
    "mean": (lambda: half(6e4, 6e4).mean(), 60000.0),
    "cumsum": (lambda: half(6e4, 6e4, -6e4).cumsum(0)[1], 120000.0),
    "norm": (lambda: half(60000.0, -60000.0).norm(), 60000 * math.sqrt(2)),
    "exp": (lambda: half(12.0).exp()[0], math.exp(12)),
    "square in a loss": (lambda: F.mse_loss(half(300.0), half(0.0)), 90000.0),
    "pow": (lambda: (half(300.0) ** 2)[0], 90000.0),
    "prod": (lambda: half(300.0, 300.0, 0.5).prod(), 45000.0),
    "std": (lambda: half(300.0, -300.0).std(correction=0), 300.0),
    "logsumexp": (lambda: torch.zeros(70000, dtype=torch.float16).logsumexp(0), math.log(70000)),
    "softmax": (lambda: torch.zeros(70000, dtype=torch.float16).softmax(0)[0], 1 / 70000),
    "log_softmax": (lambda: torch.zeros(70000, dtype=torch.float16).log_softmax(0)[0], -math.log(70000)),
    "log": (lambda: torch.tensor(1e-8).log(), math.log(1e-8)),
    "reciprocal": (lambda: half(2**-17).reciprocal()[0], 2.0**17),
    "rsqrt": (lambda: half(2**-24).rsqrt()[0] * 16, 65536.0),
}


@pytest.mark.parametrize("name", WRONG_IN_HALF)
def test_values_that_half_gets_wrong(name):
    call, expected = WRONG_IN_HALF[name]
    with autocast("mixed_float16"):
        result = call()
    assert result.dtype is torch.float32
    assert result.item() == pytest.approx(expected, rel=1e-6)


def test_torch_alone_leaves_these_in_half_on_the_cpu():
    """The reason for the function mode; an op that torch handles one day needs it no longer."""
    x = X.half()
    with torch.autocast("cpu", torch.float16):
        results = {"softmax": x.softmax(-1), "exp": x.exp(), "pow": x**2, "sum": x.sum(), "norm": x.norm(), "cumsum": x.cumsum(0)}
        results |= {"log_softmax": x.log_softmax(-1), "mean": x.mean(), "layer_norm": F.layer_norm(x, (4,))}
    assert {name for name, result in results.items() if result.dtype is torch.float32} == set()
    with torch.autocast("cpu", torch.float16):
        assert F.mse_loss(x, x).dtype is torch.float32
        assert X.mv(X[0]).dtype is torch.float32


def test_statistics_of_batch_norm_are_reduced_in_float32_by_torch_itself():
    x = half(6e4).expand(64, 2, 8, 8).contiguous()
    x[::2] = -60000.0
    mean, var = torch.ones(2), torch.zeros(2)
    with autocast("mixed_float16"):
        result = F.batch_norm(x, mean, var, training=True, momentum=1.0)
    assert result.dtype is torch.float16
    assert result.abs().max().item() == 1.0
    assert mean.tolist() == [0.0, 0.0]
    assert var[0].item() == pytest.approx(60000.0**2, rel=1e-3)


def test_only_floating_tensors_are_cast():
    ids = torch.tensor([2049, 4097])
    with autocast("mixed_float16"):
        assert F.embedding(ids, torch.arange(5000.0)[:, None]).squeeze(1).tolist() == [2049.0, 4097.0]
        assert ids.sum().item() == 6146
        assert ids.sum().dtype is torch.int64
        assert torch.tensor([True, True]).sum().dtype is torch.int64
        assert torch.stack([ids, ids]).dtype is torch.int64
        assert (ids * X[0, 0]).dtype is torch.float32
        assert torch.ones(2, dtype=torch.complex64).sum().dtype is torch.complex64
        assert torch.ones(2, dtype=torch.float64).sum().dtype is torch.float64


def test_an_explicit_dtype_or_output_is_the_callers_choice():
    x = X.half()
    out = torch.empty(4, 4, dtype=torch.float16)
    with autocast("mixed_float16"):
        assert x.sum(dtype=torch.float16).dtype is torch.float16
        assert F.softmax(X, -1, dtype=torch.bfloat16).dtype is torch.bfloat16
        assert torch.softmax(X, -1, torch.float64).dtype is torch.float64
        assert torch.exp(x, out=out) is out
        assert x.clone().exp_().dtype is torch.float16
        assert x.clone().mul_(X).dtype is torch.float16


def test_gradients_arrive_in_the_dtype_of_their_tensor():
    weight = nn.Parameter(X.clone())
    with autocast("mixed_float16"):
        hidden = X @ weight
        hidden.retain_grad()
        loss = hidden.softmax(-1).square().sum()
    loss.backward()
    assert (hidden.dtype, hidden.grad.dtype, weight.grad.dtype) == (torch.float16, torch.float16, torch.float32)


def test_float32_policy_outside_of_a_region_changes_nothing():
    with autocast("float32"):
        assert (X @ X).dtype is torch.float32
        assert X.half().sum().dtype is torch.float16
        assert not torch.is_autocast_enabled("cpu")


def test_the_innermost_region_decides():
    with autocast("mixed_float16"):
        with autocast("mixed_bfloat16"):
            assert (X @ X).dtype is torch.bfloat16
            assert X.bfloat16().sum().dtype is torch.float32
            for inner in (autocast("float32"), autocast("mixed_float16", enabled=False)):
                with inner:
                    assert (X @ X).dtype is torch.float32
                    assert X.half().sum().dtype is torch.float16
            assert (X @ X).dtype is torch.bfloat16
        assert (X @ X).dtype is torch.float16
        assert X.half().softmax(-1).dtype is torch.float32
    assert (X @ X).dtype is torch.float32
    assert X.half().softmax(-1).dtype is torch.float16


def test_a_region_ends_with_an_exception():
    def crash():
        with autocast("mixed_float16"):
            raise KeyError("stop")

    with pytest.raises(KeyError):
        crash()
    assert (X @ X).dtype is torch.float32
    assert X.half().sum().dtype is torch.float16


def test_overrides_of_ops_and_classes():
    x = X.half()
    with autocast(Policy("mixed_float16", ops={"softmax": "compute", "matmul": "float32", "relu": "float32", "sum": "pass", "exp": "promote"})):
        assert X.softmax(-1).dtype is torch.float16
        assert (x @ x).dtype is torch.float32
        assert F.linear(x, x).dtype is torch.float16
        assert F.relu(x).dtype is torch.float32
        assert x.sum().dtype is torch.float16
        assert X.sum().dtype is torch.float32
        assert x.exp().dtype is torch.float16
        assert x.mean().dtype is torch.float32
    with autocast(Policy("mixed_float16", ops={"float32": "pass", "mean": "float32"})):
        assert x.sum().dtype is torch.float16
        assert F.mse_loss(x, x).dtype is torch.float16
        assert x.mean().dtype is torch.float32


def test_as_a_decorator_and_again():
    calls = []

    @autocast("mixed_float16")
    def forward(x, depth):
        """Runs itself."""
        calls.append((x @ x).dtype)
        if depth:
            forward(x, depth - 1)
        return x.half().sum()

    for _ in range(2):
        assert forward(X, 1).dtype is torch.float32
        assert X.half().sum().dtype is torch.float16
    assert calls == [torch.float16] * 4
    assert forward.__doc__ == "Runs itself."


def test_another_thread_is_not_in_the_region():
    seen = []
    with autocast("mixed_float16"):
        thread = threading.Thread(target=lambda: seen.append(((X @ X).dtype, X.half().sum().dtype)))
        thread.start()
        thread.join()
    assert seen == [(torch.float32, torch.float16)]


def test_ops_inside_torchs_composites_are_reached():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.ones(2, 3, 8)
    with autocast("mixed_float16"):
        output, weights = attention(x, x, x)
        assert (output.dtype, weights.dtype) == (torch.float16, torch.float32)
        assert F.gumbel_softmax(x.half()).dtype is torch.float32
        assert F.local_response_norm(x.half(), 2).dtype is torch.float32
        assert F.lp_pool1d(x.half(), 2.0, 2).dtype is torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_device_warns_and_casts_nothing():
    region = autocast("mixed_float16", "cuda")
    with pytest.warns(UserWarning, match="CUDA is not available"):
        region.__enter__()
    assert (X @ X).dtype is torch.float32
    assert X.half().sum().dtype is torch.float16
    region.__exit__(None, None, None)


def test_tensors_of_another_device_are_left_alone():
    with autocast("mixed_float16"):
        meta = torch.empty(4, 4, device="meta", dtype=torch.float16)
        assert meta.sum().dtype is torch.float16
        assert (meta + meta.float()).dtype is torch.float32


def test_bad_policies_are_refused_before_the_region_starts():
    with pytest.raises(PolicyError, match="unknown policy"):
        autocast("half16")
    with pytest.raises(UnsupportedError, match="does not know the names of modules"):
        autocast(Policy("mixed_float16", islands=["head"]))


MODEL = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
CLASSES = torch.tensor([0, 1, 2, 0])


def parts(x):
    logits = MODEL(x)
    return logits, logits.softmax(-1), F.cross_entropy(logits, CLASSES), logits * torch.ones(())


def dtypes_and_values(compiled, policy):
    """A compiled region, and a region around compiled code, do what an eager one does."""
    with autocast(policy):
        eager = parts(X)
        around = compiled(parts)(X)
    inside = compiled(autocast(policy)(parts))(X)
    for results in (around, inside):
        for left, right in zip(eager, results, strict=True):
            assert left.dtype is right.dtype
            assert torch.equal(left, right)


@pytest.mark.parametrize("policy", ["mixed_float16", "p=f32,c=bf16,o=f32", Policy("mixed_float16", ops={"layer_norm": "pass"})], ids=str)
def test_one_whole_graph(policy):
    torch.compiler.reset()
    dtypes_and_values(lambda function: torch.compile(function, backend="aot_eager", fullgraph=True), policy)


def test_a_region_written_inside_a_compiled_function():
    policy = Policy("mixed_float16")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def forward(x):
        with autocast(policy):
            y = x @ x
            with autocast("float32"):
                z = y.float() @ x
        return y, y.sum(), z, x @ x

    assert [t.dtype for t in forward(X)] == [torch.float16, torch.float16, torch.float32, torch.float32]


def test_a_compiled_region_inside_and_out():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def forward(x):
        with autocast("mixed_float16"):
            y = x @ x
            return y, y.sum()

    assert [t.dtype for t in forward(X)] == [torch.float16, torch.float32]
