"""polyamp for PyTorch: GradScaler and autocast by the spec, under the names and habits of torch.amp."""

from polyamp_torch.autocast import autocast
from polyamp_torch.grad_scaler import GradScaler

__all__ = ["GradScaler", "autocast"]
