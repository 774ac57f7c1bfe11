"""The wheel in a fresh environment without extras, used from elsewhere: the command line works and says what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import ROOT

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of the fresh environment, in an empty folder."""
    folder, elsewhere = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("elsewhere")
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def start(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([programs / program, *arguments], capture_output=True, text=True, cwd=elsewhere, env=environment)

    done = start("python", "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), str(wheel))
    assert done.returncode == 0, done.stderr
    return start


def test_it_is_the_installed_package_that_runs(run: Run) -> None:
    done = run("python", "-c", "import polyamp; print(polyamp.__file__)")
    assert "site-packages" in done.stdout
    assert str(ROOT / "polyamp") not in done.stdout


def test_help_version_and_module(run: Run) -> None:
    help_ = run("polyamp", "--help")
    assert (help_.returncode, help_.stderr) == (0, "")
    assert all(name in help_.stdout for name in ("backends", "conformance", "env", "trace"))
    assert run("python", "-m", "polyamp", "--version").stdout == run("polyamp", "--version").stdout


def test_backends_lists_all_five_and_what_to_install(run: Run) -> None:
    done = run("polyamp", "backends")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("torch", "jax", "keras-tensorflow", "keras-jax", "keras-torch"):
        (line,) = [line for line in done.stdout.splitlines() if line.split()[:1] == [name]]
        assert "pip install 'polyamp[" in line


def test_env(run: Run) -> None:
    document = json.loads(run("polyamp", "env", "--json").stdout)
    assert document["packages"]["torch"] is None
    assert document["polyamp"]["python"].endswith(".".join(map(str, sys.version_info[:3])))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["conformance", "run"], "pip install 'polyamp["),
        (["trace", "show", "absent.jsonl"], "can't read trace absent.jsonl"),
    ],
)
def test_what_can_not_be_done_is_one_line_and_status_2(run: Run, arguments: list[str], words: str) -> None:
    done = run("polyamp", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_absent_framework_is_an_error_with_the_command(run: Run) -> None:
    code = "import polyamp\ntry:\n    polyamp.get_backend('jax')\nexcept polyamp.MissingFrameworkError as error:\n    print(error)"
    assert "pip install 'polyamp[jax]'" in run("python", "-c", code).stdout
