"""What the wheel and the sdist hold: exactly the five packages, whole, and the metadata that installs them."""

from __future__ import annotations

import email.message
import email.parser
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path, PurePosixPath

import pytest

from .conftest import ROOT

PACKAGES = {
    "polyamp": ROOT / "polyamp",
    "polyamp_torch": ROOT / "backends" / "polyamp_torch",
    "polyamp_jax": ROOT / "backends" / "polyamp_jax",
    "polyamp_keras": ROOT / "backends" / "polyamp_keras",
    "polyamp_conformance": ROOT / "conformance" / "polyamp_conformance",
}


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [path for path in archive.namelist() if path.endswith(f".dist-info/{name}")]
        return archive.read(path).decode()


def metadata(wheel: Path) -> email.message.Message:
    return email.parser.Parser().parsestr(read(wheel, "METADATA"))


def test_the_wheel_exposes_exactly_the_five_packages(names: set[str]) -> None:
    tops = {PurePosixPath(name).parts[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert len(tops) == len(PACKAGES) + 1


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_is_whole_and_typed(names: set[str], package: str) -> None:
    source = PACKAGES[package]
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {f"{package}/{name}" for name in files} == {name for name in names if name.startswith(f"{package}/")}
    assert f"{package}/py.typed" in names
    assert f"{package}/__init__.py" in names


@pytest.mark.parametrize("folder", ["backends", "conformance"])
def test_folders_that_hold_packages_are_none_themselves(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


def test_entry_points(wheel: Path) -> None:
    parser = ConfigParser(delimiters=("=",))
    parser.read_string(read(wheel, "entry_points.txt"))
    assert {section: dict(parser[section]) for section in parser.sections()} == {
        "console_scripts": {"polyamp": "polyamp.cli:main"},
        "polyamp": {
            "torch": "polyamp_torch.plugin",
            "jax": "polyamp_jax.plugin",
            **dict.fromkeys(("keras-tensorflow", "keras-jax", "keras-torch"), "polyamp_keras.plugin"),
        },
        "polyamp.commands": {"conformance": "polyamp_conformance.cli:conformance"},
    }


def test_what_it_requires_without_extras(wheel: Path) -> None:
    required = [line for line in metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.partition(">")[0] for line in required) == ["click", "pluggy", "rich"]


def test_extras_and_licence(wheel: Path) -> None:
    found = metadata(wheel)
    assert set(found.get_all("Provides-Extra", [])) >= {"torch", "jax", "keras", "tensorflow", "conformance", "plot", "all"}
    assert found["License-Expression"] == "Apache-2.0"
    assert read(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_the_sdist_holds_sources_and_tests_but_no_ci(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        paths = {PurePosixPath(*PurePosixPath(name).parts[1:]).as_posix() for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "noxfile.py", "constraints.txt", "tests/core/test_policy.py"} <= paths
    assert not [path for path in paths if path.split("/")[0] in (".ci", ".git", ".venv", ".nox") or "__pycache__" in path]
