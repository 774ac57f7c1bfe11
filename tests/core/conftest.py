"""Fixtures: distributions that exist as metadata and modules in a folder on the path, as an installer would lay them down."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest


class Install(Protocol):
    def __call__(self, name: str, entry_points: Mapping[str, Mapping[str, str]], modules: Mapping[str, str] = ..., version: str = ...) -> Path: ...


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Lays down a distribution: its entry points by group, and its modules by name. Returns the folder that was put on the path."""
    before = set(sys.modules)

    def lay_down(name: str, entry_points: Mapping[str, Mapping[str, str]], modules: Mapping[str, str] = {}, version: str = "1.0") -> Path:
        folder = tmp_path / f"site-{name}-{version}"
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = (f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items()) for group, entries in entry_points.items())
        (info / "entry_points.txt").write_text("\n".join(groups))
        for module, source in modules.items():
            (folder / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(folder)
        return folder

    yield lay_down
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[module]
