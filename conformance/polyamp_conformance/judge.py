"""Judges: the rules by which an observed trace is accepted.

Rules (docs/spec.md, section 9.4)
- `exact`: every step's scale, skip, scale after, digest and values must be equal.
- `replay`: every step starts from the reference's state. Skip, scale, counters must be equal unless the step is a tie (|headroom| below
  0.03 bits, or order-ambiguous). Updates must agree within 6 % of the tensor's largest one; a skipped step moves nothing.
- `free_run`: the first 25 steps must agree outside ties, the accuracy must be above 95 % and within half a point of float32.
- More than 15 % ties, or fewer than 20 decided skips, is a fault of the workload: undecided, whoever was tested.
"""

from __future__ import annotations

import math

from polyamp.trace import StepRecord, Trace
from polyamp_conformance.cases.base import Status, Verdict

__all__ = ["EXACT_STEPS", "TIE_BITS", "TOLERANCE", "exact", "free_run", "is_tie", "replay"]

TIE_BITS = 0.03
TOLERANCE = 0.06
ADAMW_TOLERANCE = 1e-3
EXACT_STEPS = 25
MAX_TIES, MIN_SKIPS = 0.15, 20
CERTIFIED_BITS = 24
ACCURACY, ACCURACY_GAP = 0.95, 0.005


def is_tie(record: StepRecord) -> bool:
    """Whether the oracle calls the step too close to decide; injected steps never are."""
    values = record.values
    return record.reason != "injected" and (abs(values.get("headroom", math.inf)) < TIE_BITS or values.get("ambiguous", 0) > 0)


def exact(observed: Trace, expected: Trace) -> Verdict:
    """Accepts only equality, step by step."""
    facts = {"steps": len(expected.records), "skips": len(expected.skips)}
    bits = (expected.footer or {}).get("certified_bits")
    if bits is not None:
        facts["certified_bits"] = round(bits, 1)
        if bits > CERTIFIED_BITS:
            return Verdict(Status.UNDECIDED, f"the workload needs {bits:.1f} bits: more than float32 accumulates exactly", facts)
    for got, want in zip(observed.records, expected.records, strict=False):
        for name in ("step", "skipped", "scale", "scale_after", "digest"):
            if getattr(got, name) != getattr(want, name):
                return Verdict(Status.FAIL, _mismatch(got, want, name), {**facts, "first_mismatch": want.step})
        for name, value in want.values.items():
            if name not in _CONTEXT and not _same(got.values.get(name, math.nan), value):
                text = f"step {want.step}, {_setting(got, want)}: {_value_fault(name, got, want)}"
                return Verdict(Status.FAIL, text, {**facts, "first_mismatch": want.step})
    if len(observed.records) != len(expected.records):
        return Verdict(Status.FAIL, f"the run ended after {len(observed.records)} of {len(expected.records)} steps", facts)
    return Verdict(Status.PASS, f"{len(expected.records)} steps equal, {len(expected.skips)} skips", facts)


def replay(observed: Trace, expected: Trace) -> Verdict:
    """Judges each step on its own, from the reference's state."""
    ties = [r.step for r in expected.records if is_tie(r)]
    decided = [r for r in expected.records if r.skipped and not is_tie(r)]
    facts: dict[str, float | int | str] = {"steps": len(expected.records), "skips": len(expected.skips), "ties": len(ties)}
    lint = _workload_fault(expected, len(ties), len(decided))
    if lint:
        return Verdict(Status.UNDECIDED, lint, facts)
    worst = 0.0
    for got, want in zip(observed.records, expected.records, strict=False):
        if is_tie(want):
            continue
        for name in ("step", "skipped", "scale", "scale_after"):
            if getattr(got, name) != getattr(want, name):
                return Verdict(Status.FAIL, _mismatch(got, want, name), {**facts, "first_mismatch": want.step})
        fault = _values_fault(got, want)
        if fault:
            return Verdict(Status.FAIL, f"step {want.step}, {_setting(got, want)}: {fault}", {**facts, "first_mismatch": want.step})
        worst = max(worst, got.values.get("update_error", 0.0), got.values.get("slots_error", 0.0))
    if len(observed.records) != len(expected.records):
        return Verdict(Status.FAIL, f"the replay ended after {len(observed.records)} of {len(expected.records)} steps", facts)
    facts["largest_error"] = round(worst, 5)
    return Verdict(Status.PASS, f"{len(expected.records)} single steps agree, {len(ties)} ties; updates within {100 * worst:.2g} %", facts)


def free_run(observed: Trace, expected: Trace) -> Verdict:
    """Judges a natural free run: its beginning, and what it learned. The rest is reported."""
    totals = observed.footer or {}
    accuracy, baseline = totals.get("accuracy", math.nan), totals.get("accuracy_float32", math.nan)
    parted = next((w.step for g, w in zip(observed.records, expected.records, strict=False) if _events(g) != _events(w)), None)
    facts = {
        "steps": len(observed.records),
        "skips": len(observed.skips),
        "expected_skips": len(expected.skips),
        "accuracy": round(accuracy, 4),
        "accuracy_float32": round(baseline, 4),
        "parts_at": "never" if parted is None else parted,
    }
    for got, want in zip(observed.records[:EXACT_STEPS], expected.records, strict=False):
        if is_tie(want):
            break  # from a tie onwards either way is right
        if _events(got) != _events(want):
            name = next(n for n in ("skipped", "scale", "scale_after") if getattr(got, n) != getattr(want, n))
            return Verdict(Status.FAIL, _mismatch(got, want, name), facts)
    if len(observed.records) != len(expected.records):
        return Verdict(Status.FAIL, f"the run ended after {len(observed.records)} of {len(expected.records)} steps", facts)
    learned = f"held-out accuracy {100 * accuracy:.1f} % in 16 bits, {100 * baseline:.1f} % in float32"
    if not accuracy > ACCURACY:
        return Verdict(Status.FAIL, f"{learned}: expected above {100 * ACCURACY:.0f} %", facts)
    if accuracy < baseline - ACCURACY_GAP:
        return Verdict(Status.FAIL, f"{learned}: expected within {100 * ACCURACY_GAP} points", facts)
    where = "same events as the oracle to the end" if parted is None else f"parts from the oracle at step {parted}, as rounding may"
    return Verdict(Status.PASS, f"{learned}; {len(observed.skips)} skips; {where}", facts)


_CONTEXT = {"headroom", "ambiguous"}  # what the oracle says about a step, not what the step did
_VALUE_CAUSE = {
    "good_steps": "the counter of finite steps was not reset, not restored, or counts otherwise",
    "hysteresis_left": "the hysteresis is refilled or used up at another time",
    "optimizer_steps": "the optimizer's step count moved on a skipped step, or was not restored",
    "slots_digest": "optimizer slots differ in bits: they moved on a skipped step, or gradients were unscaled otherwise",
    "moved": "a skipped step moved weights or optimizer slots",
    "skipped_total": "skips are not counted",
}


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _events(record: StepRecord) -> tuple[float, bool, float]:
    return record.scale, record.skipped, record.scale_after


def _workload_fault(expected: Trace, ties: int, decided_skips: int) -> str | None:
    if ties > MAX_TIES * len(expected.records):
        return f"{ties} of {len(expected.records)} steps are ties: the workload decides too little, choose another seed"
    if decided_skips < MIN_SKIPS:
        return f"only {decided_skips} decided skips, at least {MIN_SKIPS} are needed: lengthen the workload"
    masked = (expected.footer or {}).get("masked_inf", 0)
    return f"{masked} steps mask an infinity that reaches no parameter: frameworks disagree on it" if masked else None


def _setting(got: StepRecord, want: StepRecord) -> str:
    text = f"scale {got.scale:g} -> {got.scale_after:g} (expected {want.scale:g} -> {want.scale_after:g})"
    return f"{text}, headroom {want.values['headroom']:+.2f} bits" if "headroom" in want.values else text


def _mismatch(got: StepRecord, want: StepRecord, name: str) -> str:
    return f"step {want.step}, {_setting(got, want)}: {_cause(got, want, name)}"


def _cause(got: StepRecord, want: StepRecord, name: str) -> str:
    if name == "skipped" and want.skipped:
        how = "the injected overflow" if want.reason == "injected" else "an overflow"
        return f"{how} was not skipped: the check misses a tensor or a kind of value, or a clipped, saturated or wider gradient hid it"
    if name == "skipped":
        return "a finite step was skipped: a false alarm of the check, an overflow that the reference does not have, or 16-bit accumulation"
    if name == "scale_after" and want.skipped:
        return "the backoff differs: backoff_factor, hysteresis, or a floor that was lost"
    if name == "scale_after":
        return "the growth differs: growth_interval off by one, a counter not reset or not restored, or the ceiling"
    if name == "scale":
        return "the step runs with another scale than the one that the state held: it was updated too early or not restored"
    if name == "digest":
        moved = "a skipped step moved the weights" if want.skipped else "the update differs in bits: unscaling, master precision or the optimizer"
        return f"weights differ: {moved}"
    return "the steps are not the same ones"


def _value_fault(name: str, got: StepRecord, want: StepRecord) -> str:
    cause = _VALUE_CAUSE.get(name, "the step did something else")
    if name.endswith("_digest"):
        return cause  # two hashes tell a reader nothing
    return f"{name} is {got.values.get(name)}, expected {want.values[name]:g}: {cause}"


def _values_fault(got: StepRecord, want: StepRecord) -> str | None:
    values = got.values
    for name in ("good_steps", "hysteresis_left", "optimizer_steps", "moved"):
        if name in want.values and not _same(values.get(name, math.nan), want.values[name]):
            return _value_fault(name, got, want)
    for name, limit in (("update_error", TOLERANCE), ("slots_error", TOLERANCE), ("formula_error", ADAMW_TOLERANCE)):
        if not values.get(name, 0.0) <= limit:
            error, ratio = values[name], values.get("gradient_ratio", 0.0)
            power = round(math.log2(ratio)) if 0 < ratio < math.inf else 0
            if power and abs(math.log2(ratio) - power) < 0.05:
                cause = f"the gradient is 2^{power} of what it should be: unscaled with another scale than it carries"
            else:
                cause = "unscaled in 16 bits, masters kept in 16 bits, or another optimizer rule"
            return f"{name} {error:.3g} of the largest entry (at most {limit:g}): {cause}"
    return None
