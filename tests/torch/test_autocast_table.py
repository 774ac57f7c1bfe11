"""Every op of the spec's table runs in its class, in each spelling that torch has for it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polyamp import OP_RULES, OpClass
from polyamp_torch import autocast
from polyamp_torch.op_names import OPS

HALF = (torch.float16, torch.bfloat16)
POLICY = {torch.float16: "mixed_float16", torch.bfloat16: "mixed_bfloat16"}
X = torch.linspace(0.25, 0.75, 16).reshape(4, 4)
CLASSES = torch.arange(4)
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])
KERNEL = torch.ones(2, 1, 2, 2)


def spelled_twice(name):
    return [lambda x: getattr(torch, name)(x), lambda x: getattr(x, name)()]


FLOAT32_CALLS = {
    **{name: spelled_twice(name) for name in ("exp", "expm1", "exp2", "log", "log2", "log10", "log1p", "reciprocal", "rsqrt", "sinh", "cosh")},
    **{name: spelled_twice(name) for name in ("tan", "acos", "asin", "erfinv", "sum", "mean", "var", "std", "prod")},
    "pow": [lambda x: x**2, lambda x: 2**x, lambda x: x**x, lambda x: x.pow(2), lambda x: torch.pow(x, 2)],
    "softplus": [F.softplus],
    "softmax": [lambda x: x.softmax(-1), lambda x: torch.softmax(x, -1), lambda x: F.softmax(x, -1), nn.Softmax(-1)],
    "log_softmax": [lambda x: x.log_softmax(-1), lambda x: F.log_softmax(x, -1), lambda x: torch.special.log_softmax(x, -1)],
    "softmin": [lambda x: F.softmin(x, -1)],
    "logsumexp": [lambda x: x.logsumexp(-1), lambda x: torch.logsumexp(x, -1), lambda x: torch.special.logsumexp(x, -1)],
    "cumsum": [lambda x: x.cumsum(0), lambda x: torch.cumsum(x, 0)],
    "cumprod": [lambda x: x.cumprod(0), lambda x: torch.cumprod(x, 0)],
    "norm": [lambda x: x.norm(), torch.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm],
    "normalize": [F.normalize],
    "renorm": [lambda x: x.renorm(2, 0, 1.0)],
    "dist": [lambda x: x.dist(x + 1), lambda x: torch.dist(x, x + 1)],
    "cdist": [lambda x: torch.cdist(x, x + 1), lambda x: torch.cdist(x.repeat(16, 16), x.repeat(16, 16) + 1)],
    "pdist": [F.pdist],
    "cosine_similarity": [lambda x: F.cosine_similarity(x, x + 1), lambda x: torch.cosine_similarity(x, x + 1)],
    "layer_norm": [lambda x: F.layer_norm(x, (4,)), nn.LayerNorm(4)],
    "group_norm": [lambda x: F.group_norm(x[None], 2), lambda x: nn.GroupNorm(2, 4)(x[None])],
    "rms_norm": [lambda x: F.rms_norm(x, (4,)), nn.RMSNorm(4)],
    "instance_norm": [lambda x: F.instance_norm(x[None])],
    "cross_entropy": [lambda x: F.cross_entropy(x, CLASSES), lambda x: nn.CrossEntropyLoss()(x, CLASSES)],
    "nll_loss": [lambda x: F.nll_loss(x, CLASSES)],
    "mse_loss": [lambda x: F.mse_loss(x, x + 1), lambda x: nn.MSELoss()(x, x + 1)],
    "l1_loss": [lambda x: F.l1_loss(x, x + 1)],
    "smooth_l1_loss": [lambda x: F.smooth_l1_loss(x, x + 1)],
    "huber_loss": [lambda x: F.huber_loss(x, x + 1)],
    "kl_div": [lambda x: F.kl_div(x, x, reduction="batchmean")],
    "binary_cross_entropy": [lambda x: F.binary_cross_entropy(x, x)],
    "binary_cross_entropy_with_logits": [lambda x: F.binary_cross_entropy_with_logits(x, x)],
    "cosine_embedding_loss": [lambda x: F.cosine_embedding_loss(x, x + 1, SIGNS)],
    "hinge_embedding_loss": [lambda x: F.hinge_embedding_loss(x, SIGNS.expand(4, 4))],
    "margin_ranking_loss": [lambda x: F.margin_ranking_loss(x[0], x[1], SIGNS)],
    "multilabel_margin_loss": [lambda x: F.multilabel_margin_loss(x, CLASSES.expand(4, 4))],
    "multi_margin_loss": [lambda x: F.multi_margin_loss(x, CLASSES)],
    "soft_margin_loss": [lambda x: F.soft_margin_loss(x, SIGNS.expand(4, 4))],
    "triplet_margin_loss": [lambda x: F.triplet_margin_loss(x, x + 1, x + 2)],
    "poisson_nll_loss": [lambda x: F.poisson_nll_loss(x, x)],
    "gaussian_nll_loss": [lambda x: F.gaussian_nll_loss(x, x + 1, x)],
    "ctc_loss": [lambda x: F.ctc_loss(x[:, None], torch.tensor([[1]]), torch.tensor([4]), torch.tensor([1]))],
}
COMPUTE_CALLS = {
    "matmul": [lambda x: x @ x, lambda x: x.matmul(x), lambda x: torch.mm(x, x)],
    "einsum": [lambda x: torch.einsum("ij,jk->ik", x, x)],
    "linear": [lambda x: F.linear(x, x), nn.Linear(4, 4)],
    "bmm": [lambda x: torch.bmm(x[None], x[None])],
    "mv": [lambda x: x.mv(x[0]), lambda x: torch.mv(x, x[0])],
    "addmm": [lambda x: torch.addmm(x, x, x)],
    "addmv": [lambda x: torch.addmv(x[0], x, x[0])],
    "addbmm": [lambda x: torch.addbmm(x, x[None], x[None])],
    "baddbmm": [lambda x: torch.baddbmm(x[None], x[None], x[None])],
    "tensordot": [lambda x: torch.tensordot(x, x, 1)],
    "multi_dot": [lambda x: torch.linalg.multi_dot([x, x, x])],
    "conv1d": [lambda x: F.conv1d(x[None], x[:, :, None])],
    "conv2d": [lambda x: F.conv2d(x[None, None], KERNEL), nn.Sequential(nn.Unflatten(0, (1, 1, 4)), nn.Conv2d(1, 2, 2))],
    "conv3d": [lambda x: F.conv3d(x[None, None, None], KERNEL[:, :, None])],
    "conv_transpose1d": [lambda x: F.conv_transpose1d(x[None], x[:, :, None])],
    "conv_transpose2d": [lambda x: F.conv_transpose2d(x[None, None], KERNEL.mT.transpose(0, 1))],
    "conv_transpose3d": [lambda x: F.conv_transpose3d(x[None, None, None], KERNEL.transpose(0, 1)[:, :, None])],
    "scaled_dot_product_attention": [lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])],
    "prelu": [lambda x: F.prelu(x, torch.ones(1)), nn.PReLU()],
    "rnn_cell": [nn.RNNCell(4, 4), nn.RNNCell(4, 4, nonlinearity="relu")],
    "gru_cell": [nn.GRUCell(4, 4)],
    "lstm_cell": [lambda x: nn.LSTMCell(4, 4)(x)[0]],
}
PROMOTE_CALLS = {
    "add": [lambda x, y: x + y, torch.add, lambda x, y: x.add(y)],
    "sub": [lambda x, y: x - y, torch.sub, torch.rsub],
    "mul": [lambda x, y: x * y, torch.multiply],
    "div": [lambda x, y: x / y, torch.true_divide],
    "addcdiv": [lambda x, y: torch.addcdiv(x, y, x)],
    "addcmul": [lambda x, y: torch.addcmul(x, y, x)],
    "atan2": [torch.atan2],
    "bilinear": [lambda x, y: F.bilinear(x, y, torch.ones(2, 4, 4))],
    "cat": [lambda x, y: torch.cat([x, y])],
    "concatenate": [lambda x, y: torch.concatenate((x, y)), lambda x, y: torch.concat([x, y])],
    "stack": [lambda x, y: torch.stack([x, y])],
    "where": [lambda x, y: torch.where(x > 0.5, x, y), lambda x, y: x.where(x > 0.5, y)],
    "cross": [lambda x, y: torch.cross(x[:3], y[:3], dim=0), lambda x, y: torch.linalg.cross(x[:3], y[:3], dim=0)],
    "dot": [lambda x, y: torch.dot(x[0], y[0]), lambda x, y: x[0].dot(y[0])],
    "grid_sample": [lambda x, y: F.grid_sample(x[None, None], y.reshape(1, 2, 4, 2), align_corners=False)],
    "index_put": [lambda x, y: x.index_put((CLASSES,), y)],
    "scatter_add": [lambda x, y: x.scatter_add(0, CLASSES.expand(4, 4), y), lambda x, y: torch.scatter_add(x, 0, CLASSES.expand(4, 4), y)],
}
# Names without a function of torch: other frameworks' spellings, and two that torch runs right by itself.
ABSENT = {"attention", "batch_norm_statistics", "chain_matmul", "conv", "conv_transpose", "depthwise_conv", "separable_conv"}


def calls(table):
    return [pytest.param(call, id=f"{op}-{number}") for op, variants in table.items() for number, call in enumerate(variants)]


@pytest.mark.parametrize(
    ("op_class", "table"), [(OpClass.FLOAT32, FLOAT32_CALLS), (OpClass.COMPUTE, COMPUTE_CALLS), (OpClass.PROMOTE, PROMOTE_CALLS)]
)
def test_every_op_of_the_table_is_tried(op_class, table):
    assert set(table) == {op for op, cls in OP_RULES.items() if cls is op_class} - ABSENT


def test_every_op_that_torch_has_is_known():
    known = {"attention", "batch_norm_statistics", "broadcast", "conv_transpose", "depthwise_conv", "max_pool", "separable_conv", "slice"}
    assert OP_RULES.keys() - set(OPS.values()) == known


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("call", calls(FLOAT32_CALLS))
def test_float32_ops_compute_in_float32(call, dtype):
    x = X.to(dtype)
    wide = call(x.float())
    with autocast(POLICY[dtype]):
        result = call(x)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, wide, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("call", calls(COMPUTE_CALLS))
def test_compute_ops_run_in_the_compute_dtype(call, dtype):
    for x in (X, X.to(dtype)):
        with autocast(POLICY[dtype]):
            assert call(x).dtype is dtype


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("call", calls(PROMOTE_CALLS))
def test_promote_ops_run_in_the_widest_input(call, dtype):
    narrow = X.to(dtype)
    with autocast(POLICY[dtype]):
        assert call(narrow, X).dtype is torch.float32
        assert call(X, narrow).dtype is torch.float32


@pytest.mark.parametrize("op", ["relu", "tanh", "sigmoid", "abs", "neg", "round", "sign"])
def test_pass_ops_run_in_what_they_are_given(op):
    with autocast("mixed_float16"):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert getattr(torch, op)(X.to(dtype)).dtype is dtype
