"""TraceRecorder: the trace of a JAX training loop, without waiting for the device at each step.

Rules (docs/spec.md, sections 3.4 and 6)
- `record` is called once after every step, outside `jit`. It copies a few scalars on the device, so the state may be donated to the next step.
- Every `every` steps the scalars of all but the latest step are read at once: a read never waits for the step that was just dispatched.
- A stall is noticed at those reads. The records up to it are written before `LossScaleStalled` is raised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from polyamp.errors import MisuseError
from polyamp.policy import Policy
from polyamp.trace import StepRecord, Trace, TraceWriter
from polyamp_jax.casting import differentiable
from polyamp_jax.finite import INF, leaf_names
from polyamp_jax.loss_scale import LossScaleState

if TYPE_CHECKING:
    import numpy as np
    from jax import Array

    from polyamp_jax.mixed_precision import TrainState

__all__ = ["TraceRecorder"]


@jax.jit
def _observe(state: LossScaleState, loss: Array) -> tuple[Array, Array]:
    return jnp.stack([state.scale, loss.astype(jnp.float32)]), jnp.stack([state.consecutive_skips, state.steps])


class TraceRecorder:
    """Records scale, skip and reason of every step, in memory or in a trace file.

        with TraceRecorder(state, "run.jsonl", policy=mp.policy) as recorder:
            for x, y in batches:
                state, loss = step(state, x, y)
                recorder.record(state, loss)

    Args:
        state: `TrainState` or `LossScaleState` before the first recorded step. It is read once.
        path: trace file to write; by default records are kept in memory.
        every: steps between two reads of the device.
        policy: policy for the header.
        header: further header entries, such as seed and workload.
        overwrite: whether an existing file may be replaced.

    Raises:
        TraceError: the file exists, or can't be created.
        MisuseError: `every` is below 1, or `state` is traced or a batch of states.
    """

    def __init__(
        self,
        state: TrainState | LossScaleState,
        path: str | Path | None = None,
        *,
        every: int = 50,
        policy: Policy | None = None,
        header: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        if every < 1:
            raise MisuseError(f"every={every!r}: expected a number of steps >= 1")
        scale_state = _scale_state(state)
        values = scale_state.values()
        self.config = scale_state.config
        self._names = () if isinstance(state, LossScaleState) else leaf_names(differentiable(state.params))
        self._every = every
        self._scale, self._steps = values.scale, values.steps
        self._pending: list[tuple[Array, Array, Array | None, bool]] = []
        self._records: list[StepRecord] = []
        self._header = _header(self.config, policy) | dict(header or {})
        self._writer = None if path is None else TraceWriter(path, self._header, overwrite=overwrite)

    def record(self, state: TrainState | LossScaleState, loss: Any = None, status: Any = None) -> None:
        """Notes one step.

        Args:
            state: state that the step returned.
            loss: its unscaled loss, where it is to be recorded.
            status: its `gradient_status`, where skips are to be explained by tensor.

        Raises:
            MisuseError: called inside a jitted function, or not once a step.
            LossScaleStalled: `max_consecutive_skips` was reached at a step that was read now.
        """
        scale_state = _scale_state(state)
        if isinstance(scale_state.scale, jax.core.Tracer) or jnp.ndim(scale_state.scale):
            raise MisuseError("record() takes the state of one run, outside jit: return the state from the jitted step and record it there")
        self._pending.append((*_observe(scale_state, scale_state.scale if loss is None else jnp.asarray(loss)), status, loss is not None))
        if len(self._pending) > self._every:
            self._drain(len(self._pending) - 1, watch=True)

    def drain(self) -> None:
        """Reads everything that is pending; waits for the device.

        Raises:
            LossScaleStalled: `max_consecutive_skips` was reached.
        """
        self._drain(len(self._pending), watch=True)

    @property
    def trace(self) -> Trace:
        """Records that were read so far; call `drain` first to have them all. Empty where they go to a file: use `Trace.read`."""
        return Trace(self._header, tuple(self._records))

    def close(self) -> None:
        """Drains, and ends the trace file with its footer."""
        self._drain(len(self._pending), watch=False)
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self._drain(len(self._pending), watch=False)
        finally:
            if self._writer is not None:
                self._writer.__exit__(kind, error, traceback)

    def _drain(self, count: int, *, watch: bool) -> None:
        read, self._pending = self._pending[:count], self._pending[count:]
        stalled: tuple[int, StepRecord, tuple[str, ...]] | None = None
        for floats, counters, status, has_loss in jax.device_get(read):
            consecutive, steps = (int(n) for n in counters)
            bits = {} if status is None else {self._name(i): int(status[i]) for i in status.nonzero()[0]}
            record = self._record(floats, steps, consecutive > 0, bits, bool(has_loss))
            if self._writer is None:
                self._records.append(record)
            else:
                self._writer.append(record)
            if stalled is None and self.config.max_consecutive_skips is not None and consecutive >= self.config.max_consecutive_skips:
                stalled = (consecutive, record, tuple(bits))
        if watch and stalled is not None:
            consecutive, record, culprits = stalled
            forward = False if record.reason == "forward" else None
            raise self.config.stalled_error(consecutive, record.scale_after, culprits=culprits, loss_finite=forward)

    def _record(self, floats: np.ndarray, steps: int, skipped: bool, bits: Mapping[str, int], has_loss: bool) -> StepRecord:
        if steps != self._steps + 1:
            raise MisuseError(f"record() saw step {steps - 1} after step {self._steps - 1}; call it once after every step, with that step's state")
        scale_after, loss = (float(x) for x in floats)
        reason = None
        if skipped and has_loss and not math.isfinite(loss):
            reason = "forward"
        elif skipped and bits:
            reason = "overflow" if any(value & INF for value in bits.values()) else "nan"
        record = StepRecord(
            step=steps - 1,
            scale=self._scale,
            scale_after=scale_after,
            skipped=skipped,
            reason=reason,
            loss=loss if has_loss else None,
            values={f"nonfinite/{name}": float(value) for name, value in bits.items()},
        )
        self._scale, self._steps = scale_after, steps
        return record

    def _name(self, index: int) -> str:
        return self._names[index] if index < len(self._names) else str(index)


def _scale_state(state: TrainState | LossScaleState) -> LossScaleState:
    return state if isinstance(state, LossScaleState) else state.loss_scale


def _header(config: Any, policy: Policy | None) -> dict[str, Any]:
    header = {"backend": "jax", "versions": {"jax": jax.__version__}, "device": jax.default_backend(), "loss_scale": str(config)}
    return header if policy is None else header | {"policy": str(policy)}
