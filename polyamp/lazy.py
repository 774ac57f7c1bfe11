"""Lazy names: a package's public names, imported when they are first used (PEP 562).

Rules
- `import polyamp` and the packages of the backends cost next to nothing, and a plug-in module can be asked for its environment before its
  framework loads.
- A name is looked up once; afterwards it is an ordinary attribute of the package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["attach"]


def attach(package: str, homes: Mapping[str, tuple[str, ...]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the `__getattr__` and `__dir__` of a package.

    Args:
        package: the package's `__name__`.
        homes: module -> public names that live in it.
    """
    home = {name: module for module, names in homes.items() for name in names}

    def getattribute(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return getattribute, directory
