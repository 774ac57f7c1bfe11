"""polyamp for PyTorch: GradScaler and autocast by the spec."""

from polyamp_torch.grad_scaler import GradScaler

__all__ = ["GradScaler"]
