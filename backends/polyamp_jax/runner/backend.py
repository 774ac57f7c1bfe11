"""Backend: what the JAX plug-in offers to the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from polyamp.backend import Capabilities, Execution, ScaleDriver, Trainer
from polyamp.errors import UnsupportedError
from polyamp.loss_scale import LossScale
from polyamp.task import Dense, TrainingTask
from polyamp_jax.runner.devices import find_device, visible_devices
from polyamp_jax.runner.probe import probe
from polyamp_jax.runner.trainer import JaxScaleDriver, JaxTrainer

__all__ = ["JaxBackend"]

_FORMATS = ("float32", "float16", "bfloat16")
_EXECUTIONS: tuple[Execution, ...] = ("compiled", "eager")  # jit first: it is what users run


@cache
def _probe(device: str) -> dict[str, str]:
    return probe(find_device(device))


class JaxBackend:
    """Implements `polyamp.backend.Backend`."""

    name = "jax"

    def versions(self) -> Mapping[str, str]:
        return {package: _version(package) for package in ("jax", "jaxlib", "optax", "numpy")}

    def capabilities(self) -> Capabilities:
        devices = tuple(visible_devices())
        return Capabilities(
            devices=devices,
            formats=dict.fromkeys(devices, _FORMATS),
            subnormals={device: {name: _probe(device)[f"{name}_subnormals"] for name in _FORMATS} for device in devices},
            executions=_EXECUTIONS,
            families=("loss_scale", "step", "training"),
            layers=("dense",),
            losses=("mse", "softmax_cross_entropy"),
            optimizers=("sgd", "adamw"),
        )

    def probe(self, device: str) -> Mapping[str, str]:
        return dict(_probe(device))

    def scale_driver(self, loss_scale: LossScale, device: str, execution: Execution) -> ScaleDriver:
        return JaxScaleDriver(loss_scale, find_device(device), _known(execution))

    def trainer(self, task: TrainingTask, device: str, execution: Execution) -> Trainer:
        claims = self.capabilities()
        for layer in task.layers:
            if type(layer) is not Dense or layer.activation not in (None, "relu", "tanh"):
                raise UnsupportedError(f"{task.workload}: {layer} is not among the layers of this backend: {', '.join(claims.layers)}")
        for what, given, offered in (("loss", task.loss, claims.losses), ("optimizer", task.optimizer.name, claims.optimizers)):
            if given not in offered:
                raise UnsupportedError(f"{task.workload}: {what} {given!r} is not offered by this backend: {', '.join(offered)}")
        return JaxTrainer(task, find_device(device), _known(execution))


def _known(execution: Execution) -> Execution:
    if execution not in _EXECUTIONS:
        raise UnsupportedError(f"execution {execution!r}: this backend has {', '.join(_EXECUTIONS)}")
    return execution


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
