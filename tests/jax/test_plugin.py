"""The plug-in: found by name, asked for its environment without a framework, and flags that this jaxlib accepts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import polyamp
from polyamp.backend import Backend
from polyamp.registry import get_environment
from polyamp.xla_flags import HONEST_FLAGS, honest_flags, jaxlib_version, merge_flags, xla_environment


def run(code: str, **environment: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_registry_loads_it() -> None:
    backend = polyamp.get_backend("jax")
    assert isinstance(backend, Backend)
    assert backend.name == "jax"


def test_asking_for_the_environment_imports_no_framework() -> None:
    code = """
import sys
from polyamp.registry import get_environment
import polyamp_jax, polyamp_jax.plugin as plugin
assert plugin.polyamp_get_backend(name="torch") is None
assert plugin.polyamp_get_environment(name="torch") is None
get_environment("jax")
print([name for name in ("jax", "jaxlib", "optax", "numpy", "torch", "tensorflow", "keras") if name in sys.modules])
"""
    assert run(code) == "[]"


def test_public_names_are_the_listed_ones() -> None:
    import polyamp_jax

    assert all(hasattr(polyamp_jax, name) for name in polyamp_jax.__all__)
    assert set(polyamp_jax.__all__) <= set(dir(polyamp_jax))
    with pytest.raises(AttributeError, match="nonsense"):
        polyamp_jax.nonsense  # noqa: B018


def test_this_jaxlib_accepts_the_flags_and_computes() -> None:
    """An unknown flag aborts the process, so this is the test of the version table against the installed release."""
    flags = xla_environment({})["XLA_FLAGS"]
    assert run("import jax, jax.numpy as jnp; print(jax.jit(lambda x: x + 1)(jnp.float32(1)))", XLA_FLAGS=flags) == "2.0"


def test_unknown_flags_do_abort() -> None:
    """Why the table is gated by version: pins the behaviour of XLA."""
    code = "import jax, jax.numpy as jnp; jax.jit(lambda x: x + 1)(jnp.float32(1))"
    environment = {**os.environ, "XLA_FLAGS": "--xla_polyamp_no_such_flag=1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode != 0
    assert "xla_polyamp_no_such_flag" in result.stderr


@pytest.mark.parametrize(
    "version, count",
    [
        ("0.10.2", 4),
        ("0.8.2", 4),
        ("0.8.1", 3),
        ("0.6.0", 3),
        ("0.5.3", 0),
        ("0.11.0", 3),
        ("1.0.0", 3),
        (None, 0),
        ("dev", 0),
        ("0.7.0.dev20250801", 3),
    ],
)
def test_flags_are_gated_by_version(version: str | None, count: int) -> None:
    assert len(honest_flags(version, "x86_64")) == count


def test_the_instruction_set_is_limited_on_x86_only() -> None:
    assert "xla_cpu_max_isa" not in {flag.name for flag in honest_flags("0.10.2", "aarch64")}
    assert {flag.name for flag in honest_flags("0.10.2", "AMD64")} == {flag.name for flag in HONEST_FLAGS}


def test_what_the_user_has_set_stays() -> None:
    flags = honest_flags("0.8.1", "x86_64")
    merged = merge_flags("--xla_cpu_max_isa=AVX512 --xla_dump_to=/tmp/x", flags)
    assert merged == "--xla_cpu_max_isa=AVX512 --xla_dump_to=/tmp/x --xla_allow_excess_precision=false --xla_disable_hlo_passes=algsimp"
    assert merge_flags(merged, flags) == merged
    assert merge_flags("", flags).startswith("--xla_cpu_max_isa=AVX2 ")


def test_an_environment_that_has_all_flags_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    environment = get_environment("jax")
    assert set(environment) == {"XLA_FLAGS"}
    monkeypatch.setenv("XLA_FLAGS", environment["XLA_FLAGS"])
    assert get_environment("jax") == {}
    assert xla_environment({}, version="0.5.0") == {}
    assert jaxlib_version()
