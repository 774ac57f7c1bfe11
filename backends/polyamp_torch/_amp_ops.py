"""The one place that touches torch's private multi-tensor kernel of `torch.amp`.

Rules (docs/spec.md, section 4)
- A verdict covers raw and unscaled values: with a scale below 1 a finite scaled gradient may unscale to infinity.
- The product is taken in float32 and rounded once to the gradient's dtype.
- `found_inf` is a 0-d float32 tensor that is 0.0 or 1.0 and nothing else; a verdict is never taken back.
- Where torch, or a device, lacks the kernel, public operations do the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

__all__ = ["check_and_unscale_", "check_and_unscale_with_public_ops_", "inverse"]

_Kernel = Callable[[Sequence[Tensor], Tensor, Tensor], None]
_KERNEL = cast("_Kernel | None", getattr(torch, "_amp_foreach_non_finite_check_and_unscale_", None))


def inverse(scale: Tensor) -> Tensor:
    """Correctly rounded float32 `1 / scale`; through float64, because some devices approximate a float32 reciprocal.

    Args:
        scale: 0-d float32.
    """
    if scale.device.type == "mps":  # has no float64
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def check_and_unscale_(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor, *, recheck: bool) -> None:
    """Multiplies gradients by `inv_scale` in place and raises the flag where a value is not finite. Never waits for the device.

    Args:
        gradients: dense real floating tensors of one device and one dtype, changed in place.
        found_inf: 0-d float32 on that device, 0.0 or 1.0; set to 1.0 when a value is not finite.
        inv_scale: 0-d float32 on that device.
        recheck: whether the unscaled values are checked as well. It costs a second pass and is needed only where `inv_scale` may
            exceed 1; otherwise a finite value stays finite.
    """
    run = _check_and_unscale_with_kernel_ if _KERNEL is not None else check_and_unscale_with_public_ops_
    run(gradients, found_inf, inv_scale, recheck)


def check_and_unscale_with_public_ops_(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor, recheck: bool) -> None:
    """The same without the private kernel: slower, for torch versions and devices that lack it."""
    for gradient in gradients:
        _raise_flag_(found_inf, gradient)
        gradient.copy_(gradient.to(torch.promote_types(gradient.dtype, torch.float32)) * inv_scale)
        if recheck:
            _raise_flag_(found_inf, gradient)


def _raise_flag_(found_inf: Tensor, values: Tensor) -> None:
    found_inf.copy_(torch.maximum(found_inf, torch.isfinite(values).all().logical_not().to(found_inf.dtype)))


def _check_and_unscale_with_kernel_(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor, recheck: bool) -> None:
    kernel = cast(_Kernel, _KERNEL)
    try:
        kernel(gradients, found_inf, inv_scale)
        if recheck:
            kernel(gradients, found_inf, torch.ones_like(inv_scale))
    except NotImplementedError:  # raised by the dispatcher, before anything is written
        check_and_unscale_with_public_ops_(gradients, found_inf, inv_scale, recheck)
