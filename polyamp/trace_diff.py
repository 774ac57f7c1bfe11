"""Trace diff: the first step at which two traces part, and why.

Rules (docs/spec.md, section 6.4)
- Compared per step: scale in force, skipped, scale after; with `masters=True` also the digest of the master weights.
- Losses and other values are never compared: they differ in their last bits between frameworks.
- A trace that ends early differs at its first missing step.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyamp.trace import StepRecord, Trace

__all__ = ["Divergence", "diff"]


@dataclass(frozen=True)
class Divergence:
    """Where two traces part.

    Attributes:
        step: first step that differs.
        field: what differs first: `"scale"`, `"skipped"`, `"scale_after"`, `"digest"` or `"length"`.
        a: value in the first trace.
        b: value in the second one.
        cause: likely cause, in words.
    """

    step: int
    field: str
    a: object
    b: object
    cause: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.field} is {self.a} in the first trace and {self.b} in the second: {self.cause}"


def diff(a: Trace, b: Trace, *, masters: bool = False) -> Divergence | None:
    """Finds the first divergence, or None when the traces agree.

    Args:
        a: first trace.
        b: second trace.
        masters: whether master-weight digests must agree too, where both traces carry them.
    """
    for left, right in zip(a.records, b.records, strict=False):
        fields = ["step", "scale", "skipped", "scale_after"]
        if masters and left.digest and right.digest:
            fields.append("digest")
        for name in fields:
            if getattr(left, name) != getattr(right, name):
                return Divergence(left.step, name, getattr(left, name), getattr(right, name), _cause(name, left, right))
    if len(a.records) != len(b.records):
        longer = max(a.records, b.records, key=len)
        first_missing = longer[min(len(a.records), len(b.records))].step
        return Divergence(first_missing, "length", len(a.records), len(b.records), "one trace ends here")
    return None


def _cause(name: str, a: StepRecord, b: StepRecord) -> str:
    if name == "step":
        return "the traces do not record the same steps"
    if name == "scale":
        return "the runs start from another scale, or one changed it between steps"
    if name == "skipped":
        return "one run saw a non-finite gradient and the other did not: an overflow at the edge of the format, or a check that misses a tensor"
    if name == "scale_after":
        if a.skipped:
            return "the runs back off differently: backoff_factor, hysteresis or the floor"
        return "the runs grow differently: growth_interval, growth_factor, the ceiling, or a counter that was not restored"
    return "the weights moved differently: unscaling, the optimizer, or a skipped step that moved something"
