"""Workloads keep what docs/spec.md promises of them: seeded, dyadic where they say so, decided, and real."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polyamp.trace import Trace
from polyamp_conformance.cases import all_cases
from polyamp_conformance.cases.training import EXACT_SEEDS
from polyamp_conformance.data import HELD_OUT, batch_order, digits, stream
from polyamp_conformance.judge import CERTIFIED_BITS, MAX_TIES, MIN_SKIPS, is_tie
from polyamp_conformance.oracle.network import probe
from polyamp_conformance.oracle.trainer import OracleTrainer
from polyamp_conformance.workloads import digits_exact, digits_mlp


def test_streams_are_philox_and_keep_their_values() -> None:
    """Pinned: another generator, or another method of numpy's, would silently change every workload."""
    assert stream(0, 7).integers(0, 1000, 4).tolist() == [811, 584, 44, 890]
    assert stream(3, 101).standard_normal(3) == pytest.approx([0.2551397581310122, -0.49107884070163027, -1.2735559706859794], rel=1e-15)
    assert stream(1, 7).integers(0, 1000, 4).tolist() != [811, 584, 44, 890]


def test_digits_are_the_real_ones_and_the_split_is_fixed() -> None:
    pixels, classes, held_pixels, held_classes = digits()
    assert pixels.shape == (1300, 64)
    assert held_pixels.shape == (HELD_OUT, 64)
    assert len(classes) + len(held_classes) == 1797
    assert set(np.unique(pixels * 16)) == set(range(17))
    assert set(classes) == set(range(10))


def test_batches_are_whole_passes() -> None:
    order = batch_order(stream(0, 1), 10, 5, 4)
    assert sorted(order.ravel()[:10]) == list(range(10))
    assert sorted(order.ravel()[10:]) == list(range(10))


def test_seeds_differ_and_repeat() -> None:
    a, b, c = digits_mlp(0, "sgd"), digits_mlp(0, "sgd"), digits_mlp(1, "sgd")
    np.testing.assert_array_equal(a.inputs, b.inputs)
    np.testing.assert_array_equal(a.task.parameters["w1"], b.task.parameters["w1"])
    assert (a.task.parameters["w1"] != c.task.parameters["w1"]).any()
    assert (a.targets != c.targets).any()


@pytest.mark.parametrize("seed", range(EXACT_SEEDS))
def test_digits_exact_is_certified_and_masks_nothing(seed: int, cases, expected) -> None:
    trace: Trace = expected(cases[f"training/digits-exact/seed-{seed}"])
    assert trace.footer is not None
    assert trace.footer["certified_bits"] <= CERTIFIED_BITS
    assert len(trace.skips) >= MIN_SKIPS
    workload = digits_exact(seed)
    trainer = OracleTrainer(workload.task)
    for x, y in zip(workload.inputs, workload.targets, strict=True):
        assert not probe(workload.task, trainer.weights, x, y, trainer.state.scale).masked_inf
        trainer.step(x, y)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_digits_mlp_saw_tooths_decidedly(optimizer: str, cases, expected) -> None:
    trace: Trace = expected(cases[f"training/digits-mlp-{optimizer}/replay"])
    ties = sum(is_tie(r) for r in trace.records)
    assert ties <= MAX_TIES * len(trace.records)
    assert sum(r.skipped and not is_tie(r) for r in trace.records) >= MIN_SKIPS
    assert sum(r.scale_after > r.scale for r in trace.records) >= 10
    assert trace.footer == {"masked_inf": 0}


def test_every_case_cites_a_section_that_the_spec_has() -> None:
    spec = (Path(__file__).parents[2] / "docs" / "spec.md").read_text("utf-8")
    headings = {line.split()[1] for line in spec.splitlines() if line.startswith("#") and line.split()[1][0].isdigit()}
    modes = {f"9.4.{line[0]}" for line in spec.splitlines() if line[:3] in {f"{n}. " for n in range(1, 6)}}
    assert len(modes) == 5
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names))
    for case in all_cases():
        assert case.spec, case.name
        assert set(case.spec) <= headings | modes, case.name
