"""The torch side of the conformance suite: a `polyamp.backend.Backend` over the public classes of `polyamp_torch`."""

from polyamp_torch.runner.backend import TorchBackend

__all__ = ["TorchBackend"]
