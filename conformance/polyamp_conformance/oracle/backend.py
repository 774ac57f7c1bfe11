"""The oracle as a target: it answers the same questions as every backend, and its traces are what they are judged against."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from polyamp.backend import Capabilities, Execution, ScaleDriver, Trainer
from polyamp.loss_scale import LossScale
from polyamp.state import load_state_dict, state_dict
from polyamp.task import TrainingTask
from polyamp_conformance.oracle.trainer import OracleTrainer

__all__ = ["OracleBackend", "SpecDriver"]


class SpecDriver:
    """The core's own transition, as a `ScaleDriver`."""

    def __init__(self, loss_scale: LossScale) -> None:
        self.config, self.state = loss_scale, loss_scale.init()

    def update(self, finite: bool) -> None:
        self.state = self.config.update(self.state, finite)

    def state_dict(self) -> Mapping[str, Any]:
        return state_dict(self.config, self.state)

    def load_state_dict(self, mapping: Mapping[str, Any]) -> None:
        self.config, self.state = load_state_dict(mapping, self.config)


class OracleBackend:
    """numpy with explicit rounding. Subclass it and break one thing to see the suite notice."""

    name = "oracle"

    def versions(self) -> Mapping[str, str]:
        return {package: version(package) for package in ("numpy", "ml_dtypes")}

    def capabilities(self) -> Capabilities:
        formats = ("float32", "float16", "bfloat16")
        return Capabilities(
            devices=("cpu",),
            formats={"cpu": formats},
            subnormals={"cpu": dict.fromkeys(formats, "kept")},
            executions=("eager",),
            families=("loss_scale", "step", "training"),
            layers=("dense",),
            losses=("mse", "softmax_cross_entropy"),
            optimizers=("sgd", "adamw"),
        )

    def probe(self, device: str) -> Mapping[str, str]:
        return {"float16_matmul_accumulation": "float64", "float16_subnormals": "kept", "float32_subnormals": "kept", "float16_round_trip": "kept"}

    def scale_driver(self, loss_scale: LossScale, device: str, execution: Execution) -> ScaleDriver:
        return SpecDriver(loss_scale)

    def trainer(self, task: TrainingTask, device: str, execution: Execution) -> Trainer:
        return OracleTrainer(task)
