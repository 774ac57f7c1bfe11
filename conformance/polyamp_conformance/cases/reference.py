"""Reference runs: the oracle's free run of a workload, step by step, as a file that every backend replays from.

Rules (docs/spec.md, section 9.4)
- The file holds the snapshot before each step, and what the oracle says about the step: headroom, ambiguity.
- Arrays lie in one `.npz`; loss-scale states are JSON texts in it. No pickle.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polyamp.backend import Snapshot
from polyamp_conformance.data import Array
from polyamp_conformance.oracle.network import probe
from polyamp_conformance.oracle.optimizers import SLOTS
from polyamp_conformance.oracle.trainer import OracleTrainer
from polyamp_conformance.workloads import Workload

__all__ = ["Reference", "write_reference"]


@dataclass(frozen=True)
class Reference:
    """A reference run. Index t of `snapshots` is the state before step t; there is one more than steps."""

    snapshots: tuple[Snapshot, ...]
    headroom: Array
    ambiguous: Array
    masked_inf: int

    @classmethod
    def read(cls, path: Path) -> Reference:
        with np.load(path, allow_pickle=False) as file:
            parameters = {key.removeprefix("parameter/"): file[key] for key in file if key.startswith("parameter/")}
            slots: dict[str, dict[str, Array]] = {}
            for key in file:
                if key.startswith("slot/"):
                    _, slot, name = key.split("/")
                    slots.setdefault(slot, {})[name] = file[key]
            states = [json.loads(str(text)) for text in file["loss_scale"]]
            snapshots = tuple(
                Snapshot(
                    {name: values[t] for name, values in parameters.items()},
                    {slot: {name: values[t] for name, values in group.items()} for slot, group in slots.items()},
                    int(file["optimizer_steps"][t]),
                    state,
                )
                for t, state in enumerate(states)
            )
            return cls(snapshots, file["headroom"], file["ambiguous"], int(file["masked_inf"]))


def write_reference(workload: Workload, path: Path) -> None:
    """Runs the oracle freely over the workload and writes what it saw."""
    task = workload.task
    trainer = OracleTrainer(task)
    snapshots, probes = [trainer.snapshot()], []
    for x, y in zip(workload.inputs, workload.targets, strict=True):
        probes.append(probe(task, trainer.weights, x, y, trainer.state.scale))
        trainer.step(x, y)
        snapshots.append(trainer.snapshot())
    arrays: dict[str, Array] = {
        "loss_scale": np.array([json.dumps(dict(s.loss_scale)) for s in snapshots]),
        "optimizer_steps": np.array([s.optimizer_steps for s in snapshots]),
        "headroom": np.array([p.headroom for p in probes]),
        "ambiguous": np.array([p.ambiguous for p in probes]),
        "masked_inf": np.array(sum(p.masked_inf for p in probes)),
    }
    for name in task.parameters:
        arrays[f"parameter/{name}"] = np.stack([s.parameters[name] for s in snapshots])
        for slot in SLOTS[task.optimizer.name]:
            arrays[f"slot/{slot}/{name}"] = np.stack([s.slots[slot][name] for s in snapshots])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, allow_pickle=False, **arrays)
