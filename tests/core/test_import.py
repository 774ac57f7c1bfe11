"""Importing polyamp: what it loads, what it costs, what it offers."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest

import polyamp

HEAVY = ("torch", "jax", "jaxlib", "keras", "tensorflow", "numpy", "click", "rich", "pluggy", "matplotlib")


def in_subprocess(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import polyamp", set()),
        ("from polyamp import *", set()),
        ("import polyamp; polyamp.Policy('fp16'), polyamp.LossScale.dynamic(), polyamp.Trace", set()),
        ("import polyamp; polyamp.available_backends()", set()),
        ("import polyamp.hookspecs", {"pluggy"}),
        ("import polyamp.cli.app, polyamp.cli.trace, polyamp.cli.env, polyamp.cli.backends", {"click"}),
        ("import polyamp.cli.output, polyamp.cli.plot", {"click", "rich"}),
    ],
)
def test_what_an_import_loads(statement: str, allowed: set[str]) -> None:
    loaded = in_subprocess(f"import json, sys\n{statement}\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))")
    assert set(loaded) == allowed


def test_import_takes_less_than_50_ms() -> None:
    code = "from time import perf_counter\nt = perf_counter()\nimport polyamp\nprint(perf_counter() - t)"
    assert min(in_subprocess(code) for _ in range(5)) < 0.05


def test_a_broken_framework_does_not_break_polyamp() -> None:
    code = f"import json, sys\nsys.modules.update(dict.fromkeys({HEAVY!r}))\nfrom polyamp import *\nprint(json.dumps(str(Policy('bf16'))))"
    assert in_subprocess(code) == "params=float32,compute=bfloat16,output=float32,reduce=float32"


def test_every_public_name_is_the_object_of_its_home_module() -> None:
    assert len(set(polyamp.__all__)) == len(polyamp.__all__)
    modules = ("errors", "formats", "loss_scale", "op_rules", "policy", "registry", "trace")
    homes = [importlib.import_module(f"polyamp.{module}") for module in modules]
    for name in polyamp.__all__:
        assert any(name in home.__all__ and getattr(polyamp, name) is getattr(home, name) for home in homes), name
    assert set(polyamp.__all__) <= set(dir(polyamp))


def test_a_name_that_no_module_has_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'polyamp' has no attribute 'nonesuch'"):
        polyamp.nonesuch  # noqa: B018


def test_names_that_stay() -> None:
    assert {"Policy", "LossScale", "Trace", "available_backends", "get_backend"} <= set(polyamp.__all__)
    assert all(hasattr(polyamp.LossScale, name) for name in ("dynamic", "static", "none", "like"))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'polyamp' has no attribute 'Polisy'"):
        polyamp.Polisy  # noqa: B018


def test_every_error_is_a_polyamp_error_and_the_builtin_that_a_caller_would_catch() -> None:
    builtins = {
        **dict.fromkeys(("PolicyError", "LossScaleError", "StateError", "TraceError"), ValueError),
        **dict.fromkeys(("MisuseError", "LossScaleStalled", "DuplicateBackendError"), RuntimeError),
        "UnknownBackendError": LookupError,
        "MissingFrameworkError": ImportError,
        "UnsupportedError": NotImplementedError,
        "BackendError": Exception,
        "PolyampError": Exception,
    }
    errors = {name: getattr(polyamp, name) for name in polyamp.__all__ if isinstance(getattr(polyamp, name), type)}
    found = {name: cls for name, cls in errors.items() if issubclass(cls, Exception)}
    assert set(found) == set(builtins)
    assert all(issubclass(cls, (polyamp.PolyampError)) and issubclass(cls, builtins[name]) for name, cls in found.items())
