"""Registry: listing from metadata, loading by name, and its errors (docs/spec.md, section 9.1)."""

from __future__ import annotations

import sys

import pytest

import polyamp
from polyamp import BackendError, DuplicateBackendError, MissingFrameworkError, UnknownBackendError
from polyamp.backend import Backend
from polyamp.registry import get_environment, registered_backends

from .conftest import Install

PLUGIN = """
from polyamp.hookspecs import hookimpl

class Mine:
    name = "mine"
    def versions(self): return {"mine": "1"}
    def capabilities(self): return None
    def probe(self, device): return {}
    def scale_driver(self, loss_scale, device, execution): return None
    def trainer(self, task, device, execution): return None

@hookimpl
def polyamp_get_backend(name):
    return Mine() if name == "mine" else None

@hookimpl
def polyamp_get_environment(name):
    return {"MINE_FLAGS": "--honest"}
"""
ENTRY = {"polyamp": {"mine": "mine_plugin"}}


def test_a_plug_in_of_another_distribution_is_listed_and_loaded_by_name(install: Install) -> None:
    install("mine-dist", ENTRY, {"mine_plugin": PLUGIN}, version="2.5")
    info = registered_backends()["mine"]
    assert (info.distribution, info.version, info.module, info.missing, info.available) == ("mine-dist", "2.5", "mine_plugin", (), True)
    assert info.install == "pip install --upgrade mine-dist"
    assert "mine" in polyamp.available_backends()
    backend = polyamp.get_backend("mine")
    assert isinstance(backend, Backend)
    assert backend.name == "mine"
    assert get_environment("mine") == {"MINE_FLAGS": "--honest"}


def test_listing_imports_no_plug_in(install: Install) -> None:
    install("mine-dist", ENTRY, {"mine_plugin": "raise RuntimeError('imported')"})
    assert "mine" in registered_backends()
    assert "mine" in polyamp.available_backends()
    assert "mine_plugin" not in sys.modules


def test_loading_one_backend_imports_no_other(install: Install) -> None:
    install("broken-dist", {"polyamp": {"broken": "broken_plugin"}}, {"broken_plugin": "raise RuntimeError('imported')"})
    install("mine-dist", ENTRY, {"mine_plugin": PLUGIN})
    assert polyamp.get_backend("mine").name == "mine"
    with pytest.raises(RuntimeError, match="imported"):
        polyamp.get_backend("broken")


def test_backends_are_listed_in_order_of_name(install: Install) -> None:
    install("mine-dist", {"polyamp": {"zeta": "m", "alpha": "m"}})
    names = list(registered_backends())
    assert names == sorted(names)
    assert {"alpha", "zeta", "torch", "jax", "keras-tensorflow", "keras-jax", "keras-torch"} <= set(names)


def test_an_unknown_name_is_an_error_that_lists_the_registered_ones(install: Install) -> None:
    install("mine-dist", ENTRY)
    for call in (polyamp.get_backend, get_environment):
        with pytest.raises(UnknownBackendError) as caught:
            call("mime")
        assert all(word in str(caught.value) for word in ("'mime'", "mine", "keras-jax"))


def test_two_distributions_of_one_name_are_an_error_that_names_both(install: Install) -> None:
    install("first-dist", ENTRY, version="1.1")
    install("second-dist", ENTRY, version="2.2")
    for call in (registered_backends, polyamp.available_backends, lambda: polyamp.get_backend("mine")):
        with pytest.raises(DuplicateBackendError) as caught:
            call()
        assert all(word in str(caught.value) for word in ("'mine'", "first-dist 1.1", "second-dist 2.2", "uninstall one"))


def test_one_distribution_found_twice_on_the_path_is_no_duplicate(install: Install) -> None:
    install("mine-dist", ENTRY, {"mine_plugin": PLUGIN}, version="1.0")
    install("mine-dist", ENTRY, {"mine_plugin": PLUGIN}, version="1.0.1")
    assert polyamp.get_backend("mine").name == "mine"


@pytest.mark.parametrize(
    ("name", "absent", "command"),
    [
        ("torch", "torch", "pip install 'polyamp[torch]'"),
        ("jax", "jax", "pip install 'polyamp[jax]'"),
        ("jax", "optax", "pip install 'polyamp[jax]'"),
        ("keras-tensorflow", "tensorflow", "pip install 'polyamp[tensorflow]'"),
        ("keras-jax", "keras", "pip install 'polyamp[keras,jax]'"),
        ("keras-torch", "torch", "pip install 'polyamp[keras,torch]'"),
    ],
)
def test_a_missing_framework_is_an_error_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, name: str, absent: str, command: str
) -> None:
    import polyamp.registry

    monkeypatch.setattr(polyamp.registry, "find_spec", lambda module: None if module == absent else object())
    assert registered_backends()[name].missing == (absent,)
    assert name not in polyamp.available_backends()
    with pytest.raises(MissingFrameworkError) as caught:
        polyamp.get_backend(name)
    assert all(word in str(caught.value) for word in (repr(name), absent, command))
    assert isinstance(caught.value, ImportError)


def test_a_plug_in_whose_own_requirement_is_missing_says_how_to_install_it(install: Install) -> None:
    install("mine-dist", ENTRY, {"mine_plugin": "import a_framework_of_tomorrow.core"})
    with pytest.raises(MissingFrameworkError, match=r"needs a_framework_of_tomorrow, .*pip install --upgrade mine-dist") as caught:
        polyamp.get_backend("mine")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_plug_in_whose_own_module_is_gone_surfaces_as_it_is(install: Install) -> None:
    install("mine-dist", ENTRY)
    with pytest.raises(ModuleNotFoundError, match="mine_plugin") as caught:
        polyamp.get_backend("mine")
    assert not isinstance(caught.value, MissingFrameworkError)


def test_a_framework_that_fails_in_the_hook_says_so_too(install: Install) -> None:
    source = PLUGIN.replace('return Mine() if name == "mine" else None', "import a_framework_of_tomorrow")
    install("mine-dist", ENTRY, {"mine_plugin": source})
    with pytest.raises(MissingFrameworkError, match="a_framework_of_tomorrow"):
        polyamp.get_backend("mine")


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("import json.absent", id="submodule-of-something-installed"),
        pytest.param("import mine_plugin.absent", id="its-own-module"),
        pytest.param("from json import absent", id="name-of-something-installed"),
        pytest.param("raise ImportError('libcuda.so.1: cannot open shared object file')", id="shared-library"),
    ],
)
def test_any_other_import_error_surfaces_as_it_is(install: Install, source: str) -> None:
    install("mine-dist", ENTRY, {"mine_plugin": source})
    with pytest.raises(ImportError) as caught:
        polyamp.get_backend("mine")
    assert not isinstance(caught.value, MissingFrameworkError)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param("", ["mine_plugin", "mine-dist", "no backend"], id="no-hook"),
        pytest.param(PLUGIN.replace('"mine" else', '"other" else'), ["mine_plugin", "mine-dist", "no backend"], id="none"),
        pytest.param(PLUGIN.replace("def probe", "def prove"), ["mine_plugin", "Mine", "polyamp.backend.Backend"], id="method-missing"),
        pytest.param(PLUGIN.replace("Mine()", "42"), ["mine_plugin", "int", "polyamp.backend.Backend"], id="no-backend"),
    ],
)
def test_a_plug_in_that_gives_no_backend_is_an_error_that_names_it(install: Install, source: str, words: list[str]) -> None:
    install("mine-dist", ENTRY, {"mine_plugin": source})
    with pytest.raises(BackendError) as caught:
        polyamp.get_backend("mine")
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_plug_in_without_an_environment_asks_for_nothing(install: Install) -> None:
    install("mine-dist", ENTRY, {"mine_plugin": ""})
    assert get_environment("mine") == {}
