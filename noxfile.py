"""Every check of this repository is a session here; bare `nox` runs them all, in this order, as CI does.

Rules
- Sessions use pip and the versions of constraints.txt; ruff and mypy are pinned by the dependency groups of pyproject.toml.
- `tests` runs without any framework. All sessions that need frameworks share one environment, made on first use: it takes minutes and gigabytes.
- One process never holds two frameworks by our doing: Keras' tests run once per KERAS_BACKEND.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
CONSTRAINED = ("-c", "constraints.txt")
BACKENDS = ("torch", "jax", "keras-tensorflow", "keras-jax", "keras-torch")
KERAS_BACKENDS = ("tensorflow", "jax", "torch")
FRAMEWORK_MODULES = ("torch", "jax", "keras", "tensorflow")
# Beyond polyamp[all]: libraries that the tests hold the presets and integrations against.
NEIGHBOURS = ("flax", "jmp", "equinox")


def group(name: str) -> list[str]:
    return list(nox.project.dependency_groups(PROJECT, name))


@nox.session
def lint(session: nox.Session) -> None:
    """ruff: rules and format."""
    session.install(*group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def typing(session: nox.Session) -> None:
    """mypy, strict on the core and the conformance suite."""
    session.install(*CONSTRAINED, "-e", ".[conformance]", *group("typing"))
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """The core, where no framework is installed."""
    session.install(*CONSTRAINED, "-e", ".", *group("test"))
    absent = "import importlib.util, sys; found = [m for m in sys.argv[1:] if importlib.util.find_spec(m)]; assert not found, found"
    session.run("python", "-c", absent, *FRAMEWORK_MODULES, "numpy", silent=True)
    session.run("pytest", "tests/core", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Wheel and sdist: their contents, and the wheel installed elsewhere without extras."""
    session.install(*CONSTRAINED, "build", *group("test"))
    dist = Path(session.create_tmp()) / "dist"
    for old in dist.glob("*"):
        old.unlink()
    session.run("python", "-m", "build", "--outdir", str(dist), silent=True)
    session.run("pytest", "tests/packaging", *session.posargs, env={"POLYAMP_DIST": str(dist)})


@nox.session
def plugin(session: nox.Session) -> None:
    """A backend of another distribution, installed and run through the conformance suite."""
    session.install(*CONSTRAINED, "-e", ".[conformance]", *group("test"))
    session.install(*CONSTRAINED, "./tests/example_plugin")  # apart: pip looks for polyamp on the index when both come at once
    session.run("polyamp", "backends")
    session.run("pytest", "tests/plugin", *session.posargs)


@nox.session(venv_backend="none")
@nox.parametrize("framework", [nox.param(name, id=name) for name in ("torch", "jax", "keras")])
def backend(session: nox.Session, framework: str) -> None:
    """One backend's own tests; Keras' under each of its three backends."""
    python = frameworks(session)
    for keras_backend in KERAS_BACKENDS if framework == "keras" else (None,):
        env = {"KERAS_BACKEND": keras_backend} if keras_backend else {}
        session.run(python, "-m", "pytest", f"tests/{framework}", *session.posargs, env=env, external=True)


@nox.session(venv_backend="none")
def conformance(session: nox.Session) -> None:
    """The suite's own tests, then the suite over all backends. A backend that is named and missing fails the run."""
    python = frameworks(session)
    session.run(python, "-m", "pytest", "tests/conformance", "tests/core/test_cli_plot.py", *session.posargs, external=True)
    named = [argument for name in BACKENDS for argument in ("--backend", name)]
    report = ROOT / ".nox" / "conformance-report"
    session.run(python, "-m", "polyamp", "conformance", "run", *named, "-o", str(report), "--force", external=True)


def frameworks(session: nox.Session) -> str:
    """Python of the environment with all frameworks; made anew when pyproject.toml, the constraints or the interpreter changed."""
    folder = ROOT / ".nox" / "frameworks"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = folder / "made-from"
    sources = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt", "noxfile.py")]
    key = hashlib.sha256(b"\0".join([*sources, sys.version.encode()])).hexdigest()
    if not stamp.exists() or stamp.read_text() != key:
        session.run(sys.executable, "-m", "venv", "--clear", str(folder), external=True)
        install = (str(python), "-m", "pip", "install", "-q", *CONSTRAINED, "-e", ".[all]", *NEIGHBOURS, *group("test"))
        session.run(*install, external=True)
        stamp.write_text(key)
    return str(python)
