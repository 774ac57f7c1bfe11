"""Two installed distributions that register one backend name: every command that lists or loads says so."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

try:
    distribution("polyamp-example")
except PackageNotFoundError:
    pytest.skip("polyamp-example is not installed; nox -s plugin installs it", allow_module_level=True)

TWIN = Path(__file__).parents[1] / "example_plugin_twin"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installs the twin into a folder of its own, which only the programs that these tests start have on their path."""
    folder = tmp_path_factory.mktemp("twin")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, TWIN], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("arguments", [["backends"], ["backends", "--json"], ["conformance", "run", "--backend", "example", "-o", "never-made"]])
def test_the_error_names_both_distributions(twin: Path, tmp_path: Path, arguments: list[str]) -> None:
    path = os.pathsep.join(filter(None, [str(twin), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-m", "polyamp", *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert all(word in done.stderr for word in ("'example'", "polyamp-example 1.0.0", "polyamp-example-twin 2.0.0", "uninstall one of them"))
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "never-made").exists()
