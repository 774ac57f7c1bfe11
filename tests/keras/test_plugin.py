"""The plug-in: no framework before the environment is known, one Keras backend a process."""

from __future__ import annotations

import os
import subprocess
import sys

import keras
import pytest

from polyamp import BackendError
from polyamp.backend import Backend
from polyamp.registry import get_backend, get_environment
from polyamp_keras import plugin

NAMES = ("keras-tensorflow", "keras-jax", "keras-torch")


@pytest.mark.parametrize("name", NAMES)
def test_asking_for_the_environment_loads_no_framework(name: str) -> None:
    code = (
        f"import sys; from polyamp.registry import get_environment; e = get_environment({name!r}); print(e['KERAS_BACKEND']); "
        "print(sorted({'keras', 'tensorflow', 'jax', 'torch', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split("\n")[:2] == [name.removeprefix("keras-"), "[]"]


def test_environment_keeps_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TF_CPP_MIN_LOG_LEVEL", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "XLA_FLAGS"):
        monkeypatch.delenv(variable, raising=False)
    assert get_environment("keras-torch") == {
        "KERAS_BACKEND": "torch",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    assert "--xla_allow_excess_precision=false" in get_environment("keras-jax")["XLA_FLAGS"]
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    assert get_environment("keras-torch") == {"KERAS_BACKEND": "torch", "MKL_NUM_THREADS": "1"}


def test_the_backend_of_this_process(backend: str) -> None:
    found = get_backend(f"keras-{backend}")
    assert isinstance(found, Backend)
    assert found.name == f"keras-{backend}"
    assert found.versions()["keras"] == keras.__version__
    assert backend in found.versions()


def test_another_backend_needs_another_process(backend: str) -> None:
    other = next(name for name in NAMES if name != f"keras-{backend}")
    with pytest.raises(BackendError, match=rf"start another process with KERAS_BACKEND={other.removeprefix('keras-')}"):
        get_backend(other)
    assert os.environ["KERAS_BACKEND"] == backend


def test_names_of_others_are_left_to_them() -> None:
    assert plugin.polyamp_get_backend("torch") is None
    assert plugin.polyamp_get_environment("torch") is None


def test_get_backend_chooses_the_backend_when_keras_is_not_loaded(backend: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "KERAS_BACKEND"}
    code = f"from polyamp import get_backend; print(get_backend('keras-{backend}').name)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == f"keras-{backend}"
