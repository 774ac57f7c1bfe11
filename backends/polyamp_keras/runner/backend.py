"""Backend: what the three Keras plug-ins offer to the conformance suite. One Keras backend a process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from polyamp import LossScale, UnsupportedError
from polyamp.backend import Capabilities, Execution, ScaleDriver, Trainer
from polyamp.task import Dense, TrainingTask
from polyamp_keras.native import BACKEND
from polyamp_keras.runner.devices import visible_devices
from polyamp_keras.runner.driver import KerasScaleDriver
from polyamp_keras.runner.probe import FORMAT_NAMES, probe
from polyamp_keras.runner.trainer import KerasTrainer
from polyamp_keras.versions import backend_name, versions

__all__ = ["KerasBackend"]

# Keras' torch backend compiles nothing by default: both executions would be the same one.
_EXECUTIONS: tuple[Execution, ...] = ("eager",) if BACKEND == "torch" else ("compiled", "eager")

_probe = cache(probe)


class KerasBackend:
    """Implements `polyamp.backend.Backend` for the Keras backend of this process."""

    def __init__(self) -> None:
        self.name = backend_name()
        if BACKEND == "tensorflow":
            import tensorflow as tf

            # Grappler's remapping fuses a bias into its matmul, which then rounds once instead of twice.
            tf.config.optimizer.set_experimental_options({"remapping": False})

    def versions(self) -> Mapping[str, str]:
        return versions()

    def capabilities(self) -> Capabilities:
        devices = tuple(visible_devices())
        return Capabilities(
            devices=devices,
            formats=dict.fromkeys(devices, FORMAT_NAMES),
            subnormals={device: {name: _probe(device)[f"{name}_subnormals"] for name in FORMAT_NAMES} for device in devices},
            executions=_EXECUTIONS,
            families=("loss_scale", "step", "training"),
            layers=("dense",),
            losses=("mse", "softmax_cross_entropy"),
            optimizers=("sgd", "adamw"),
        )

    def probe(self, device: str) -> Mapping[str, str]:
        return dict(_probe(device))

    def scale_driver(self, loss_scale: LossScale, device: str, execution: Execution) -> ScaleDriver:
        return KerasScaleDriver(loss_scale, device, _known(execution))

    def trainer(self, task: TrainingTask, device: str, execution: Execution) -> Trainer:
        claims = self.capabilities()
        for layer in task.layers:
            if type(layer) is not Dense or layer.activation not in (None, "relu", "tanh"):
                raise UnsupportedError(f"{task.workload}: {layer} is not among the layers of this backend: {', '.join(claims.layers)}")
        asked: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
            ("loss", task.loss, claims.losses),
            ("optimizer", task.optimizer.name, claims.optimizers),
        )
        for what, given, offered in asked:
            if given not in offered:
                raise UnsupportedError(f"{task.workload}: {what} {given!r} is not offered by this backend: {', '.join(offered)}")
        return KerasTrainer(task, device, _known(execution))


def _known(execution: Execution) -> Execution:
    if execution not in _EXECUTIONS:
        raise UnsupportedError(f"execution {execution!r}: {backend_name()} has {', '.join(_EXECUTIONS)}")
    return execution
