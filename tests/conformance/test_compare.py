"""`polyamp conformance compare`: traces and runs of two machines, by the rules of each case."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from polyamp.cli.app import cli
from polyamp.trace import Trace
from polyamp_conformance.runner import Options, run

_HONEST = "polyamp_conformance.oracle.backend:OracleBackend"


def _compare(a: Path, b: Path) -> Result:
    return CliRunner().invoke(cli, ["conformance", "compare", str(a), str(b)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("runs")
    patterns = ("loss_scale/floor", "training/digits-mlp-sgd/replay")
    for name in ("a", "b"):
        run(Options(directory=base / name, backends=(_HONEST,), patterns=patterns))
    return base / "a", base / "b"


def _trace(folder: Path, case: str) -> Path:
    return next((folder / "traces" / "oracle").glob(f"{case.replace('/', '.')}@*.jsonl"))


def test_equal_runs_agree(runs: tuple[Path, Path]) -> None:
    outcome = _compare(*runs)
    assert outcome.exit_code == 0, outcome.output
    assert "4 of 4 agree" in outcome.output


def test_a_changed_step_is_found_by_the_rule_of_its_case(runs: tuple[Path, Path], tmp_path: Path) -> None:
    path = _trace(runs[0], "training/digits-mlp-sgd/replay")
    trace = Trace.read(path)
    decided = next(r for r in trace.records if r.skipped and abs(r.values["headroom"]) > 0.1)
    tie = next(r for r in trace.records if abs(r.values["headroom"]) < 0.03)
    for record, code in ((decided, 1), (tie, 0)):
        flipped = replace(record, skipped=not record.skipped)
        changed = Trace(trace.header, tuple(flipped if r is record else r for r in trace.records), trace.footer)
        other = tmp_path / f"{record.step}.jsonl"
        changed.write(other)
        outcome = _compare(path, other)
        # The rewritten file has lost the oracle's totals, which only the first of the two needs.
        assert outcome.exit_code == code, outcome.output
        if code:
            assert f"step {record.step}" in outcome.output


def test_traces_of_no_case_are_compared_step_by_step(runs: tuple[Path, Path], tmp_path: Path) -> None:
    trace = Trace.read(_trace(runs[0], "loss_scale/floor"))
    for name, records in (("a", trace.records), ("b", (*trace.records[:-1], replace(trace.records[-1], scale_after=64.0)))):
        Trace({"backend": name}, records).write(tmp_path / f"{name}.jsonl")
    outcome = _compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert outcome.exit_code == 1
    assert f"step {trace.records[-1].step}: scale_after" in outcome.output


def test_what_cannot_be_compared(runs: tuple[Path, Path], tmp_path: Path) -> None:
    trace = _trace(runs[0], "loss_scale/floor")
    for a, b, words in (
        (runs[0], trace, "can't compare a folder with a file"),
        (trace, tmp_path / "none.jsonl", "can't read trace"),
        (tmp_path, runs[0], "holds no results.jsonl"),
    ):
        outcome = _compare(a, b)
        assert outcome.exit_code == 2
        assert words in outcome.output
    (tmp_path / "c").mkdir()
    lines = (runs[0] / "results.jsonl").read_text("utf-8").splitlines()
    first = {**json.loads(lines[0]), "seed": 9}
    (tmp_path / "c" / "results.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]))
    outcome = _compare(tmp_path / "c", runs[0])
    assert outcome.exit_code == 2
    assert "different seeds" in outcome.output
