"""Verdict and unscaling of one optimizer's gradients.

Rules (docs/spec.md, section 4)
- One multi-tensor pass per device and dtype, one flag per device.
- A parameter without a gradient counts as finite.
- A parameter that two optimizers share is unscaled once, and counts for the verdict of both.
- Sparse gradients are coalesced first: duplicate indices may add up to infinity. Complex ones are seen as pairs of reals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from polyamp.errors import MisuseError
from polyamp_torch._amp_ops import check_and_unscale_

__all__ = ["Remaining", "dense_gradients", "optimizer_parameters", "unscale_gradients"]

Remaining = dict[int, Tensor]
"""Parameters that a step already handled, by `id`, with the 0-d factor by which their gradients still have to be multiplied."""


def optimizer_parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """All parameters of an optimizer, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def dense_gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a parameter and the dense real tensor that holds its gradient's values; parameters without a gradient are left out."""
    for parameter in optimizer_parameters(optimizer):
        if parameter.grad is None:
            continue
        values = parameter.grad
        if values.is_sparse:
            parameter.grad = values = values.coalesce()
            values = values._values()
        yield parameter, torch.view_as_real(values) if values.is_complex() else values


def unscale_gradients(
    optimizer: torch.optim.Optimizer, inv_scale: Tensor, remaining: Remaining, *, recheck: bool, allow_float16: bool = False
) -> dict[torch.device, Tensor]:
    """Multiplies the gradients of an optimizer by `inv_scale` in place, those of `remaining` by their own factor.

    Args:
        optimizer: its gradients are changed; a sparse one may be replaced.
        inv_scale: 0-d float32.
        remaining: parameters that this step has handled before.
        recheck: whether a finite value may become infinite, i.e. a factor may exceed 1.
        allow_float16: whether float16 gradients may be unscaled in place, where the result may lose bits or flush to zero.

    Returns:
        0-d float32 flags by device, 1.0 where a gradient is not finite; empty when no parameter has a gradient.

    Raises:
        polyamp.MisuseError: float16 gradients that are not allowed; nothing is changed.
    """
    groups: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = defaultdict(list)
    factors = {id(inv_scale): inv_scale}
    for parameter, values in dense_gradients(optimizer):
        if values.dtype is torch.float16 and not allow_float16:
            raise MisuseError(
                "unscale_() got float16 gradients, which lose small values when they are unscaled in place; keep the parameters in float32 "
                "and let autocast run the computation in float16"
            )
        factor = remaining.get(id(parameter), inv_scale)
        factors[id(factor)] = factor
        groups[values.device, values.dtype, id(factor)].append(values)
    flags: dict[torch.device, Tensor] = {}
    with torch.no_grad():
        for (device, _, factor_id), values_list in groups.items():
            if device not in flags:
                flags[device] = torch.zeros((), dtype=torch.float32, device=device)
            factor = factors[factor_id].to(device, non_blocking=True)
            check_and_unscale_(values_list, flags[device], factor, recheck=recheck)
    return flags
