"""The example distribution, once it is installed: found, listed, and conforming in what it claims."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from xml.etree import ElementTree

import pytest

try:
    distribution("polyamp-example")
except PackageNotFoundError:
    pytest.skip("polyamp-example is not installed; nox -s plugin installs it", allow_module_level=True)


def polyamp(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "polyamp", *map(str, arguments)], capture_output=True, text=True)


def test_it_is_listed_as_installed_with_its_distribution() -> None:
    done = polyamp("backends")
    assert done.returncode == 0
    assert ["example", "polyamp-example", "1.0.0", "installed"] in [line.split() for line in done.stdout.splitlines()]


def test_it_conforms_in_what_it_claims_and_claims_no_more(tmp_path: Path) -> None:
    done = polyamp("conformance", "run", "--backend", "example", "-o", tmp_path / "report")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "report" / "results.jsonl").read_text().splitlines()]
    results = [line for line in lines if line["kind"] == "result" and line["backend"] == "example"]
    by_family: dict[str, set[str]] = {}
    for result in results:
        by_family.setdefault(result["case"].partition("/")[0], set()).add(result["status"])
    assert by_family == {"loss_scale": {"pass"}, "step": {"not claimed"}, "training": {"not claimed"}}
    assert sum(result["status"] == "pass" for result in results) >= 20
    target = next(line for line in lines if line["kind"] == "target" and line["name"] == "example")
    assert target["versions"]["polyamp-example"] == "1.0.0"
    suites = ElementTree.parse(tmp_path / "report" / "junit.xml").getroot()
    example = next(suite for suite in suites.iter("testsuite") if suite.get("name") == "example")
    assert (example.get("failures"), example.get("errors")) == ("0", "0")
    assert "example" in (tmp_path / "report" / "report.html").read_text(encoding="utf-8")


def test_a_second_run_replaces_nothing_unasked(tmp_path: Path) -> None:
    run = ("conformance", "run", "--backend", "example", "--family", "loss_scale", "-o", tmp_path / "report")
    assert polyamp(*run).returncode == 0
    before = (tmp_path / "report" / "results.jsonl").read_bytes()
    again = polyamp(*run)
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert (tmp_path / "report" / "results.jsonl").read_bytes() == before
    assert polyamp(*run, "--force").returncode == 0


def test_it_trains_nothing_and_says_so() -> None:
    code = (
        "from types import SimpleNamespace\nimport polyamp\n"
        "try:\n    polyamp.get_backend('example').trainer(SimpleNamespace(workload='digits-mlp'), 'cpu', 'eager')\n"
        "except polyamp.UnsupportedError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "digits-mlp" in done.stdout
