"""Keras tests run in one process a backend: KERAS_BACKEND chooses it, and the honest environment of that backend is set before Keras loads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from polyamp.registry import get_environment

BACKEND = os.environ.get("KERAS_BACKEND", "")
if BACKEND not in ("tensorflow", "jax", "torch"):
    raise pytest.UsageError(f"tests/keras needs KERAS_BACKEND=tensorflow, jax or torch in the environment, one run each; it is {BACKEND!r}")
os.environ.update(get_environment(f"keras-{BACKEND}"))

if BACKEND == "tensorflow":
    import tensorflow as tf

    # Two devices on one CPU, for tf.distribute; they can't be split later.
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)


def pytest_configure(config: pytest.Config) -> None:
    # Keras' variables lack the copy argument of numpy 2's protocol; every save of a model says so.
    config.addinivalue_line("filterwarnings", "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
    config.addinivalue_line("markers", "only(*backends): runs on these Keras backends alone, because the feature exists nowhere else")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    elsewhere = [item for item in items if (marker := item.get_closest_marker("only")) and BACKEND not in marker.args]
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in elsewhere]


@pytest.fixture(params=["eager"] if BACKEND == "torch" else ["eager", "compiled"])
def execution(request: pytest.FixtureRequest) -> str:
    """Both sides of the compile boundary; Keras compiles nothing on torch by default."""
    return str(request.param)


@pytest.fixture
def backend() -> str:
    """Keras backend of this run."""
    return BACKEND


@pytest.fixture(autouse=True)
def clean_keras() -> Iterator[None]:
    """Every test starts from the float32 policy and the same seed."""
    import keras

    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")
