"""The backend: what it claims, and the machinery that it offers to the suite."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version

from polyamp import LossScale, UnsupportedError
from polyamp.backend import Capabilities, Execution, ScaleDriver, Trainer
from polyamp.task import TrainingTask
from polyamp_example.scaler import Scaler

__all__ = ["ExampleBackend"]


class ExampleBackend:
    """Loss scaling in plain Python, on the CPU, without a compiler."""

    name = "example"

    def versions(self) -> Mapping[str, str]:
        return {"polyamp-example": version("polyamp-example"), "python": platform.python_version()}

    def capabilities(self) -> Capabilities:
        return Capabilities(devices=("cpu",), executions=("eager",), families=("loss_scale",))

    def probe(self, device: str) -> Mapping[str, str]:
        return {"float32_subnormals": "kept"}

    def scale_driver(self, loss_scale: LossScale, device: str, execution: Execution) -> ScaleDriver:
        if (device, execution) != ("cpu", "eager"):
            raise UnsupportedError(f"example runs eagerly on the cpu, not {execution} on {device!r}")
        return Scaler(loss_scale)

    def trainer(self, task: TrainingTask, device: str, execution: Execution) -> Trainer:
        raise UnsupportedError(f"example scales losses and trains nothing; {task.workload} needs a backend of the training family")
