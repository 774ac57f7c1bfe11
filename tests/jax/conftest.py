"""Fixtures of the JAX tests: strict dtype promotion everywhere, and a counter of traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """An implicit promotion is an error, except where a test says that it runs code of optax that relies on one."""
    mode = "standard" if request.node.get_closest_marker("standard_promotion") else "strict"
    with jax.numpy_dtype_promotion(mode):
        yield


@pytest.fixture
def counted() -> Callable[[Callable[..., Any]], tuple[Callable[..., Any], list[int]]]:
    """Wraps a function so that each run of its Python body, and so each trace, is counted."""

    def wrap(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
        runs = [0]

        def inner(*args: Any) -> Any:
            runs[0] += 1
            return function(*args)

        return inner, runs

    return wrap


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "standard_promotion: runs optax code that needs jax's implicit dtype promotion")
