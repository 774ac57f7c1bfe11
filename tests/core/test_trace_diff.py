"""Trace diff: the first diverging step and its cause (docs/spec.md, section 6.4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polyamp import StepRecord, Trace
from polyamp.trace_diff import diff

BASE = Trace(
    {"backend": "torch"},
    tuple(StepRecord(step=i, scale=8.0, scale_after=8.0, skipped=i == 1, loss=1.0, digest=f"d{i}", values={"headroom": 1.0}) for i in range(4)),
)


def changed(index: int, /, **changes: Any) -> Trace:
    records = list(BASE.records)
    records[index] = replace(records[index], **changes)
    return replace(BASE, records=tuple(records))


@pytest.mark.parametrize(
    ("step", "changes", "field", "words"),
    [
        (2, {"step": 9}, "step", "same steps"),
        (2, {"scale": 4.0}, "scale", "another scale"),
        (2, {"skipped": True}, "skipped", "misses a tensor"),
        (2, {"scale_after": 16.0}, "scale_after", "grow differently"),
        (1, {"scale_after": 4.0}, "scale_after", "back off differently"),
    ],
)
def test_each_compared_field(step: int, changes: dict[str, Any], field: str, words: str) -> None:
    other = changed(step, **changes)
    found = diff(BASE, other)
    assert found is not None
    assert (found.step, found.field) == (step, field)
    assert (found.a, found.b) == (getattr(BASE.records[step], field), changes[field])
    assert words in found.cause
    assert all(str(part) in str(found) for part in (f"step {step}", field, found.a, found.b, words))


def test_the_first_difference_wins_and_within_a_step_the_scale_comes_first() -> None:
    other = changed(3, scale=1.0)
    both = replace(other, records=(*other.records[:2], replace(other.records[2], scale=1.0, skipped=True, scale_after=0.5), other.records[3]))
    found = diff(BASE, both)
    assert found is not None
    assert (found.step, found.field) == (2, "scale")


@pytest.mark.parametrize("changes", [{"loss": 2.0}, {"values": {"headroom": 2.0}}, {"reason": "nan"}, {"digest": "other"}])
def test_what_is_not_compared(changes: dict[str, Any]) -> None:
    assert diff(BASE, changed(1, **changes)) is None


def test_headers_and_footers_are_not_compared() -> None:
    assert diff(BASE, Trace({"backend": "jax"}, BASE.records, {"steps": 4}, truncated=True)) is None


def test_master_digests_are_compared_on_request() -> None:
    found = diff(BASE, changed(2, digest="other"), masters=True)
    assert found is not None
    assert (found.step, found.field, found.a, found.b) == (2, "digest", "d2", "other")
    assert "weights moved" in found.cause
    assert diff(BASE, changed(2, digest=None), masters=True) is None


@pytest.mark.parametrize("swap", [False, True])
def test_a_trace_that_ends_early_differs_at_its_first_missing_step(swap: bool) -> None:
    short = replace(BASE, records=BASE.records[:3])
    found = diff(short, BASE) if swap else diff(BASE, short)
    assert found is not None
    assert (found.step, found.field) == (3, "length")
    assert (found.a, found.b) == ((3, 4) if swap else (4, 3))


def test_a_missing_step_is_named_by_its_own_number() -> None:
    late = replace(BASE, records=tuple(replace(record, step=record.step + 100) for record in BASE.records))
    found = diff(late, replace(late, records=late.records[:2]))
    assert found is not None
    assert found.step == 102
