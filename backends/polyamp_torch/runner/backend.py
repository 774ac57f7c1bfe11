"""The torch backend of the conformance suite.

Rules (docs/spec.md, section 9.1)
- What is claimed is what `trainer` and `scale_driver` build; everything else is refused with `UnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch

from polyamp import LossScale, UnsupportedError
from polyamp.backend import Capabilities, Execution, ScaleDriver
from polyamp.task import TrainingTask
from polyamp_torch.runner.compiler import compile_backend
from polyamp_torch.runner.drivers import CompiledDriver, ScalerDriver
from polyamp_torch.runner.probe import probe, subnormals
from polyamp_torch.runner.trainer import SLOTS, TorchTrainer

__all__ = ["TorchBackend"]

_FORMATS = ("float32", "bfloat16", "float16")
_EXECUTIONS: tuple[Execution, ...] = ("eager", "compiled")
_ACTIVATIONS = (None, "relu", "tanh")


class TorchBackend:
    """Implements `polyamp.backend.Backend`."""

    name = "torch"

    def versions(self) -> Mapping[str, str]:
        versions = {"torch": str(torch.__version__), "numpy": np.__version__, "torch.compile": compile_backend("cpu")}
        if torch.version.cuda:
            versions["cuda"] = torch.version.cuda
        return versions

    def capabilities(self) -> Capabilities:
        return _capabilities()

    def probe(self, device: str) -> Mapping[str, str]:
        self._require_device(device)
        return _probe(device)

    def scale_driver(self, loss_scale: LossScale, device: str, execution: Execution) -> ScaleDriver:
        self._require_device(device)
        _require("execution", execution, _EXECUTIONS)
        return ScalerDriver(loss_scale, device) if execution == "eager" else CompiledDriver(loss_scale, device)

    def trainer(self, task: TrainingTask, device: str, execution: Execution) -> TorchTrainer:
        self._require_device(device)
        _require("execution", execution, _EXECUTIONS)
        _require("param_dtype", task.policy.param_dtype, ("float32",))
        _require("compute_dtype", task.policy.compute_dtype, _FORMATS)
        _require("loss", task.loss, self.capabilities().losses)
        _require("optimizer", task.optimizer.name, tuple(SLOTS))
        for layer in task.layers:
            _require("activation", layer.activation, _ACTIVATIONS)
        if execution == "compiled" and self.probe(device)["float16_round_trip"] != "kept":
            raise UnsupportedError(
                f"torch.compile of torch {torch.__version__} removes casts to float16 and back even with emulate_precision_casts, so that "
                "overflows vanish; train eagerly, or upgrade torch"
            )
        return TorchTrainer(task, device, execution)

    def _require_device(self, device: str) -> None:
        _require("device", device, self.capabilities().devices)


_probe = cache(probe)


@cache
def _capabilities() -> Capabilities:
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return Capabilities(
        devices=devices,
        formats=dict.fromkeys(devices, _FORMATS),
        subnormals={device: {name: subnormals(device, name) for name in _FORMATS} for device in devices},
        executions=_EXECUTIONS,
        families=("loss_scale", "step", "training"),
        layers=("dense",),
        losses=("mse", "softmax_cross_entropy"),
        optimizers=tuple(SLOTS),
    )


def _require(what: str, given: object, offered: tuple[object, ...]) -> None:
    if given not in offered:
        raise UnsupportedError(f"{what} {given!r}: the torch backend offers {', '.join(map(str, offered))} here")
