"""GradScaler: dynamic loss scaling for torch by the spec, under torch's own interface.

Rules (docs/spec.md, sections 3 and 4)
- State lives in 0-d device tensors and moves by `polyamp_torch.loss_scale_state.update` only.
- One step: `scale(loss)` in float32, backward, `unscale_`, the optimizer or not, `update` once.
- Fused optimizers are handed the flag and never touch the host; others need one read of one flag. A stall is noticed by a lagged read.
- Every optimizer is skipped on its own flag; the scale backs off if any flag is set.
- Calls out of order are errors, raised before anything changes.
"""

from __future__ import annotations

import inspect
import os
from functools import lru_cache
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from polyamp import LossScale, LossScaleError, MisuseError, StepRecord, Trace
from polyamp.trace import TraceWriter
from polyamp_torch import loss_scale_state
from polyamp_torch._amp_ops import inverse
from polyamp_torch.scaler_state import ScalerState
from polyamp_torch.step_records import PendingRecord, TraceBuffer, resolve
from polyamp_torch.unscaling import optimizer_parameters, unscale_gradients

__all__ = ["GradScaler"]

T = TypeVar("T")
_DEFAULTS = LossScale.dynamic()


class GradScaler(ScalerState):
    """Drop-in replacement of `torch.amp.GradScaler` that follows polyamp's spec and passes `isinstance`.

    Over torch's it has a floor and a ceiling of the scale, hysteresis, static and no scaling, stall detection, verdicts that cover the
    unscaled values, records of what each step did, and a state mapping that other backends load.

    Args:
        device: where the scale lives, e.g. `"cuda"`, `"cpu"`, `"cuda:1"`; by default the accelerator of this machine, or the CPU where it
            has none. An explicit `"cuda"` on a machine without it warns and disables the scaler, as torch does.
        init_scale: scale of the first step.
        growth_factor: > 1.
        backoff_factor: in (0, 1).
        growth_interval: consecutive finite steps until growth.
        enabled: False makes every method a pass-through.
        loss_scale: whole configuration, in place of the four values above.
        trace: path of a new trace file, or an open writer. Records are written every `trace_every` steps, by `flush()` and by `close()`;
            a scaler is a context manager that closes its trace.
        trace_every: steps between two reads of the device for the trace.

    Raises:
        polyamp.LossScaleError: a value out of range, or both `loss_scale` and values that it holds.
        polyamp.TraceError: the trace file exists.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = GradScaler("cpu", init_scale=1024.0)
        >>> loss = model(torch.ones(2, 4)).square().mean()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.last_step.skipped
        False
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = _DEFAULTS.init_scale,
        growth_factor: float = _DEFAULTS.growth_factor,
        backoff_factor: float = _DEFAULTS.backoff_factor,
        growth_interval: int = _DEFAULTS.growth_interval,
        enabled: bool = True,
        *,
        loss_scale: LossScale | None = None,
        trace: str | os.PathLike[str] | TraceWriter | None = None,
        trace_every: int = 64,
    ) -> None:
        given = (init_scale, growth_factor, backoff_factor, growth_interval)
        if loss_scale is not None and given != (_DEFAULTS.init_scale, _DEFAULTS.growth_factor, _DEFAULTS.backoff_factor, _DEFAULTS.growth_interval):
            raise LossScaleError("got loss_scale= and one of init_scale, growth_factor, backoff_factor, growth_interval; put them into loss_scale")
        if not isinstance(trace_every, int) or trace_every < 1:
            raise LossScaleError(f"trace_every={trace_every!r}: expected an integer >= 1")
        super().__init__(loss_scale or LossScale.dynamic(*given), device, enabled)
        if self._enabled and trace is not None:
            header = {
                "backend": "torch",
                "versions": {"torch": torch.__version__},
                "device": str(self._scale_device),
                "loss_scale": str(self._config),
            }
            self._buffer = TraceBuffer(
                trace if isinstance(trace, TraceWriter) else Trace.writer(os.fspath(trace), header),
                trace_every,
                owned=not isinstance(trace, TraceWriter),
            )

    def scale(self, outputs: T) -> T:
        """Multiplies a loss, or a nested list, tuple, mapping or iterator of losses, by the scale.

        float16 and bfloat16 values are cast to float32 first: a float16 loss times 65536 would overflow.

        Raises:
            polyamp.MisuseError: an optimizer's gradients are unscaled already, so that scaled ones must not be added to them.
        """
        if not self._enabled:
            return outputs
        if any(state["stage"] is OptState.UNSCALED for state in self._per_optimizer_states.values()):
            raise MisuseError("scale() after unscale_(): scaled gradients would be added to unscaled ones; call step() and update() first")
        result: T = self._window.scale(outputs, None if self._config.kind == "none" else self._state.scale)
        self._window.scaled = True
        self._window.remaining.clear()  # backward is about to bring new, scaled gradients
        return result

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients of an optimizer by the scale and takes their verdict. Optional: `step` does it otherwise.

        A parameter that another optimizer of this step holds as well is divided once. Sparse gradients may be replaced.

        Raises:
            polyamp.MisuseError: called twice, after `step`, without `scale`, or on float16 gradients.
        """
        if not self._enabled or not self._config.check:
            return
        stage = self._stage(optimizer)
        if stage is not OptState.READY:
            done = "unscale_()" if stage is OptState.UNSCALED else "step()"
            raise MisuseError(f"unscale_() after {done} on this optimizer; call it once a step, and update() at the end of the step")
        self._require_scaled("unscale_()")
        self._unscale(optimizer, allow_float16=False)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscales unless that was done, then runs `optimizer.step(*args, **kwargs)` unless a gradient is not finite.

        Returns:
            What `optimizer.step` returned, or None when it was skipped. Ask `last_step` after `update` what happened.

        Raises:
            polyamp.MisuseError: called twice, without `scale`, or with a closure, which would compute other gradients than those checked.
        """
        if not self._enabled:
            return _run(optimizer, *args, **kwargs)
        if kwargs.get("closure") is not None or (args and callable(args[0])):
            raise MisuseError("step() with a closure: it would compute gradients that nobody unscales; compute them before step()")
        stage = self._stage(optimizer)
        if stage is OptState.STEPPED:
            raise MisuseError("step() twice on this optimizer; call update() once at the end of every step")
        self._require_scaled("step()")
        if not self._config.check:
            self._window.optimizers[id(optimizer)] = optimizer
            self._window.with_gradients = True
            result = _run(optimizer, *args, **kwargs)
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            result = self._step_with_flag(optimizer, *args, **kwargs)
        else:
            if stage is OptState.READY:
                self.unscale_(optimizer)
            if self._flag(optimizer).item():
                self._window.note_infinities(optimizer, self._scale_device)
                result = None
            else:
                result = _run(optimizer, *args, **kwargs)
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends the step: moves the scale and the counters once, by all verdicts taken since the last update.

        Args:
            new_scale: sets the scale by hand instead and leaves the counters alone, as in torch; reads it on the host.

        Raises:
            polyamp.MisuseError: no optimizer was unscaled or stepped.
            polyamp.LossScaleError: `new_scale` is not within the configuration's range.
            polyamp.LossScaleStalled: `max_consecutive_skips` steps in a row were skipped; on an accelerator it may come some steps late.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._set_scale(new_scale)
            return
        window = self._window
        if not window.optimizers:
            raise MisuseError("update() without a verdict: call step(optimizer), or unscale_(optimizer), before it")
        flags = tuple(self._flag(optimizer) for optimizer in window.optimizers.values())
        found_inf = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
        before, self._state = self._state, loss_scale_state.update(self._state, self._rules, found_inf)
        self._last = PendingRecord(before, self._state, flags, tuple(window.losses), window.has_inf, not window.with_gradients)
        if self._buffer is not None:
            self._buffer.add(self._last)
        self._clear()
        stalled = self._watch.follow(self._state)
        if stalled is not None:
            raise self._config.stalled_error(*stalled, culprits=window.culprits(), loss_finite=window.losses_are_finite())

    @property
    def last_step(self) -> StepRecord | None:
        """Record of the last step that `update` ended, or None before it; reading it waits for the device."""
        if not self._enabled or self._last is None:
            return None
        return resolve([self._last])[0]

    def flush(self) -> None:
        """Writes the records collected so far to the trace; waits for the device."""
        if self._buffer is not None:
            self._buffer.flush()

    def close(self) -> None:
        """Writes the rest of the trace and its footer; the scaler stays usable and records no more."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()

    def __enter__(self) -> GradScaler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None or self._buffer is None:
            self.close()
            return
        buffer, self._buffer = self._buffer, None
        try:
            buffer.flush()
        finally:
            buffer.writer.__exit__(kind, error, traceback)  # without a footer: the run did not end cleanly

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        self._take_verdict(optimizer, self._one, recheck=False, allow_float16=True)
        return self._found_inf_per_device(optimizer)

    def _stage(self, optimizer: Optimizer) -> OptState:
        known = self._per_optimizer_states.get(id(optimizer))
        return OptState.READY if known is None else known["stage"]

    def _require_scaled(self, call: str) -> None:
        if not self._window.scaled:
            raise MisuseError(f"{call} without scale() since the last update(); compute gradients with scaler.scale(loss).backward()")

    def _unscale(self, optimizer: Optimizer, *, allow_float16: bool) -> None:
        self._take_verdict(optimizer, inverse(self._state.scale), recheck=self._watch.may_overflow, allow_float16=allow_float16)
        self._per_optimizer_states[id(optimizer)]["stage"] = OptState.UNSCALED
        self._window.remaining.update((id(parameter), self._one) for parameter in optimizer_parameters(optimizer))

    def _take_verdict(self, optimizer: Optimizer, factor: Tensor, *, recheck: bool, allow_float16: bool) -> None:
        flags = unscale_gradients(optimizer, factor, self._window.remaining, recheck=recheck, allow_float16=allow_float16)
        self._window.optimizers[id(optimizer)] = optimizer
        self._window.with_gradients |= bool(flags)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags

    def _flag(self, optimizer: Optimizer) -> Tensor:
        flags = [flag.to(self._scale_device, non_blocking=True) for flag in self._found_inf_per_device(optimizer).values()]
        if not flags:
            return torch.zeros_like(self._one)
        return flags[0] if len(flags) == 1 else torch.stack(flags).amax()

    def _step_with_flag(self, optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
        """Runs an optimizer that unscales and skips by itself, on the device.

        torch's fused kernels divide by the scale where `unscale_` multiplies by its inverse: the same for powers of two only.
        """
        if _takes_grad_scaler(type(optimizer)):  # type: ignore[arg-type]
            self._window.optimizers[id(optimizer)] = optimizer
            self._window.with_gradients = True
            return _run(optimizer, *args, **{**kwargs, "grad_scaler": self})
        parameters = list(optimizer_parameters(optimizer))
        shares = any(id(parameter) in self._window.remaining for parameter in parameters)
        if self._stage(optimizer) is OptState.READY and (self._watch.may_overflow or shares):
            self._unscale(optimizer, allow_float16=True)  # as the kernel itself does
        given = getattr(optimizer, "grad_scale", None)
        if self._stage(optimizer) is OptState.UNSCALED:
            grad_scale = given
        else:
            self._check_inf_per_device(optimizer)
            grad_scale = self._state.scale if given is None else self._state.scale * given
        flag = self._flag(optimizer)
        optimizer.grad_scale, optimizer.found_inf = grad_scale, flag
        try:
            result = _run(optimizer, *args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        if grad_scale is not given:
            # The kernel writes unscaled gradients back unless it skips.
            left = torch.where(flag != 0, inverse(self._state.scale), self._one)
            self._window.remaining.update((id(parameter), left) for parameter in parameters)
        if self._reads_are_free and flag.item():
            self._window.note_infinities(optimizer, self._scale_device)
        return result


def _run(optimizer: Any, *args: Any, **kwargs: Any) -> float | None:
    """The optimizer's own step; wrapped optimizers take more arguments than torch's type says."""
    result: float | None = optimizer.step(*args, **kwargs)
    return result


@lru_cache(maxsize=64)
def _takes_grad_scaler(optimizer_type: type[Any]) -> bool:
    """Whether `step` wants the scaler itself, torch's older contract for optimizers that scale on their own."""
    return "grad_scaler" in inspect.signature(optimizer_type.step).parameters
