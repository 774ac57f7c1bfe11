"""Backend: what a plug-in offers to the conformance suite and to `polyamp backends`.

Rules (docs/spec.md, section 9.1; docs/backends.md walks through one)
- A backend answers from its own public classes: the suite must exercise what a user calls, not a copy made for the test.
- `execution` names the two sides of the framework's compile boundary: "eager" and "compiled". A backend claims what it has.
- What a backend does not claim is reported as "not claimed", never as passed.
- A snapshot is framework-free: numpy float32 arrays and the portable state mapping of `polyamp.state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from polyamp.loss_scale import LossScale
from polyamp.task import Array, StepOutcome, TrainingTask

__all__ = ["Backend", "Capabilities", "Execution", "ScaleDriver", "Snapshot", "Trainer"]

Execution = Literal["eager", "compiled"]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend claims on one device.

    Attributes:
        devices: devices that can be named here and now, e.g. `("cpu", "cuda")`.
        formats: compute formats per device.
        subnormals: per device and format, `"kept"` or `"flushed"`.
        executions: sides of the compile boundary that it offers; the first is what users get by default, and what training cases run on.
        families: conformance families that it takes part in: `"loss_scale"`, `"step"`, `"training"`.
        layers: layer kinds of `TrainingTask` that it can build.
        losses: losses of `TrainingTask` that it can compute.
        optimizers: optimizers of `OptimizerSpec` that it offers.
    """

    devices: tuple[str, ...] = ("cpu",)
    formats: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    subnormals: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    executions: tuple[Execution, ...] = ("eager",)
    families: tuple[str, ...] = ("loss_scale",)
    layers: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """State of a trainer between two steps.

    Attributes:
        parameters: float32 master weights by name.
        slots: optimizer slots by slot name, then by parameter name: `{"v": {...}}` for SGD, `{"m": {...}, "v": {...}}` for AdamW.
        optimizer_steps: steps that the optimizer has taken, skipped ones left out.
        loss_scale: portable state mapping (`polyamp.state.state_dict`).
    """

    parameters: Mapping[str, Array]
    slots: Mapping[str, Mapping[str, Array]]
    optimizer_steps: int
    loss_scale: Mapping[str, Any]


class ScaleDriver(Protocol):
    """Drives a backend's loss-scale machinery with a script of finite and non-finite steps."""

    def update(self, finite: bool) -> None:
        """Runs one step whose gradients are all finite, or one of which is not."""

    def state_dict(self) -> Mapping[str, Any]:
        """Portable state mapping."""

    def load_state_dict(self, mapping: Mapping[str, Any]) -> None:
        """Continues from a mapping, its configuration included."""


class Trainer(Protocol):
    """Trains one task, step by step, through the backend's public classes."""

    def step(self, inputs: Array, targets: Array, loss_factor: float = 1.0) -> StepOutcome:
        """One training step on a batch.

        Args:
            inputs: float32, (batch, features).
            targets: float32 (batch, outputs) or int32 (batch,).
            loss_factor: multiplies the loss before it is scaled; the suite injects inf, NaN or 2^40 here. Recorded losses exclude it.
        """

    def apply(self, gradients: Mapping[str, Array]) -> StepOutcome:
        """One step whose *scaled* gradients are given, float32 by parameter name: check, unscale, optimizer, update."""

    def snapshot(self) -> Snapshot:
        """Copies of masters, slots, optimizer step count and loss-scale state."""

    def restore(self, snapshot: Snapshot) -> None:
        """Continues from a snapshot, of any backend."""

    def predict(self, inputs: Array) -> Array:
        """Forward pass under the task's policy: float32, (batch, outputs)."""


@runtime_checkable
class Backend(Protocol):
    """A plug-in's answer to `polyamp_get_backend`."""

    name: str

    def versions(self) -> Mapping[str, str]:
        """Versions of the framework packages that matter, for headers and reports."""

    def capabilities(self) -> Capabilities:
        """What this backend claims on this machine."""

    def probe(self, device: str) -> Mapping[str, str]:
        """Numerics of the device that could fake a mismatch (docs/spec.md, section 9.5), for the preflight.

        Keys: `float16_matmul_accumulation` (`"float32"` or `"float16"`), `float16_subnormals` and `float32_subnormals` (`"kept"` or
        `"flushed"`), `float16_round_trip` (whether a compiled cast to float16 and back rounds: `"kept"` or `"removed"`), and whatever
        else the framework is known for.
        """

    def scale_driver(self, loss_scale: LossScale, device: str, execution: Execution) -> ScaleDriver:
        """Machinery for the scripted cases of the loss-scale family."""

    def trainer(self, task: TrainingTask, device: str, execution: Execution) -> Trainer:
        """Trainer for the step and training families.

        Raises:
            UnsupportedError: the task needs something that `capabilities` does not claim.
        """
