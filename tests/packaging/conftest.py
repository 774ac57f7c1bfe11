"""Fixtures: the wheel and sdist that `nox -s build` made, named by POLYAMP_DIST."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _only(pattern: str) -> Path:
    folder = os.environ.get("POLYAMP_DIST")
    if folder is None:
        pytest.skip("POLYAMP_DIST is not set; nox -s build builds the distribution and sets it")
    (path,) = Path(folder).resolve().glob(pattern)
    return path


@pytest.fixture(scope="session")
def wheel() -> Path:
    return _only("*.whl")


@pytest.fixture(scope="session")
def sdist() -> Path:
    return _only("*.tar.gz")
