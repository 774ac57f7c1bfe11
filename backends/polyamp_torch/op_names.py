"""Torch's functions under the neutral op names of the spec's table.

Rules (docs/spec.md, section 2.3)
- A function is known by identity, as a torch function mode sees it: `torch.*`, `torch.nn.functional.*`, `torch.special.*`,
  `torch.linalg.*`, tensor methods and operators. The name of most of them is the op's.
- In-place and `out=` forms are left alone: the dtype of their result is given.
- Batch norm is left alone: with float32 running statistics torch reduces 16-bit input in float32 by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from polyamp import OP_RULES

__all__ = ["COMPOSITES", "NATIVE_COMPUTE", "OPS"]

Function = Callable[..., Any]

# Other spellings; a dotted name is looked up from `torch`.
_SPELLINGS = {
    "matmul": "mm Tensor.__matmul__ Tensor.__rmatmul__",
    "multi_dot": "linalg.multi_dot",
    "conv": "convolution",
    "rnn_cell": "rnn_tanh_cell rnn_relu_cell",
    "exp2": "special.exp2",
    "expm1": "special.expm1",
    "log1p": "special.log1p",
    "pow": "Tensor.__pow__ Tensor.__rpow__",
    "acos": "arccos Tensor.arccos",
    "asin": "arcsin Tensor.arcsin",
    "erfinv": "special.erfinv",
    "softmax": "special.softmax",
    "log_softmax": "special.log_softmax",
    "logsumexp": "special.logsumexp",
    "sum": "nansum Tensor.nansum",
    "mean": "nanmean Tensor.nanmean",
    "var": "var_mean",
    "std": "std_mean",
    "norm": "linalg.norm linalg.vector_norm linalg.matrix_norm",
    "nll_loss": "nn.functional.nll_loss2d",
    "add": "Tensor.__add__ Tensor.__radd__",
    "sub": "subtract rsub Tensor.subtract Tensor.__sub__ Tensor.__rsub__",
    "mul": "multiply Tensor.multiply Tensor.__mul__ Tensor.__rmul__",
    "div": "divide true_divide Tensor.divide Tensor.true_divide Tensor.__truediv__ Tensor.__rtruediv__ Tensor.__rdiv__",
    "atan2": "arctan2 Tensor.arctan2",
    "concatenate": "concat",
    "cross": "linalg.cross",
    "clip": "clamp Tensor.clamp",
}
_UNCAST_STATISTICS = {"batch_norm_statistics"}

NATIVE_COMPUTE = frozenset(op for op, cls in OP_RULES.items() if cls == "compute") - {"mv", "addmv", "gru_cell", "lstm_cell"}
"""COMPUTE ops that torch.autocast casts on every device, with its cache of cast weights; the CPU's list lacks the others."""


def _lookup(path: str) -> Function | None:
    found: Any = torch
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found  # type: ignore[no-any-return]


def _functions() -> dict[Function, str]:
    functions: dict[Function, str] = {}
    for op in OP_RULES.keys() - _UNCAST_STATISTICS:
        for path in (op, f"nn.functional.{op}", f"Tensor.{op}", *_SPELLINGS.get(op, "").split()):
            function = _lookup(path)
            if callable(function):
                functions[function] = op
    return functions


OPS: dict[Function, str] = _functions()
"""Torch function -> neutral op."""

COMPOSITES: tuple[Function, ...] = (F.multi_head_attention_forward, F.gumbel_softmax, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d, F.local_response_norm)
"""Python functions without a class of their own that call ops of the table inside."""
