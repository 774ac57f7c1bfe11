"""Registry: which backends are installed, and loading one by name.

Rules (docs/spec.md, section 9.1)
- Listing reads the metadata of installed distributions and imports nothing.
- Loading always passes the name: only that plug-in is imported, so one broken framework never breaks another.
- Two distributions that offer one name: an error that names both. A framework that is not installed: an error with the command that
  installs it. Any other ImportError surfaces as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from polyamp.backend import Backend
from polyamp.errors import BackendError, DuplicateBackendError, MissingFrameworkError, UnknownBackendError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import pluggy

# importlib.metadata and pluggy are imported where they are used: together they would double the time of `import polyamp`.

__all__ = ["BackendInfo", "available_backends", "get_backend", "get_environment", "registered_backends"]

GROUP = "polyamp"

# What the in-house backends need, and the extra that brings it. A plug-in of another distribution brings its own requirements.
_FRAMEWORKS: dict[str, tuple[tuple[str, ...], str]] = {
    "torch": (("torch",), "torch"),
    "jax": (("jax", "optax"), "jax"),
    "keras-tensorflow": (("keras", "tensorflow"), "tensorflow"),
    "keras-jax": (("keras", "jax"), "keras,jax"),
    "keras-torch": (("keras", "torch"), "keras,torch"),
}


@dataclass(frozen=True)
class BackendInfo:
    """A registered backend, read from metadata alone.

    Attributes:
        name: backend name.
        distribution: distribution that registers it.
        version: version of that distribution.
        module: plug-in module.
        missing: required top-level modules that are not installed.
        install: command that installs what is missing.
    """

    name: str
    distribution: str
    version: str
    module: str
    missing: tuple[str, ...]
    install: str

    @property
    def available(self) -> bool:
        return not self.missing


def registered_backends() -> Mapping[str, BackendInfo]:
    """All registered backends by name, sorted; imports nothing.

    Raises:
        DuplicateBackendError: two distributions register one name.
    """
    from importlib.metadata import entry_points

    found: dict[str, BackendInfo] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        info = _info(entry)
        other = found.get(entry.name)
        if other is None:
            found[entry.name] = info
        elif (other.distribution, other.module) != (info.distribution, info.module):
            raise DuplicateBackendError(
                f"backend {entry.name!r} is registered twice: by {other.distribution} {other.version} ({other.module}) and by "
                f"{info.distribution} {info.version} ({info.module}); uninstall one of them"
            )
    return found


def available_backends() -> tuple[str, ...]:
    """Names of the registered backends whose framework is installed; imports none of them."""
    return tuple(name for name, info in registered_backends().items() if info.available)


def get_backend(name: str) -> Backend:
    """Loads a backend by name, importing its framework.

    Args:
        name: `"torch"`, `"jax"`, `"keras-tensorflow"`, `"keras-jax"`, `"keras-torch"`, or the name of an installed plug-in.

    Raises:
        UnknownBackendError: nobody registers the name.
        MissingFrameworkError: its framework is not installed; the message has the command that installs it.
        DuplicateBackendError: two distributions register the name.
    """
    info = _require(name)
    if info.missing:
        raise MissingFrameworkError(f"backend {name!r} needs {', '.join(info.missing)}, which is not installed; run: {info.install}")
    try:
        backend: Backend | None = _manager(name).hook.polyamp_get_backend(name=name)
    except ModuleNotFoundError as error:
        root = (error.name or "").partition(".")[0]
        if not root or root == info.module.partition(".")[0] or find_spec(root) is not None:
            raise
        raise MissingFrameworkError(f"backend {name!r} needs {root}, which is not installed; run: {info.install}") from error
    if backend is None:
        raise BackendError(f"plug-in {info.module} of {info.distribution} registers {name!r} but returned no backend for it")
    if not isinstance(backend, Backend):
        raise BackendError(f"plug-in {info.module} returned {type(backend).__name__} for {name!r}, which lacks methods of polyamp.backend.Backend")
    return backend


def get_environment(name: str) -> Mapping[str, str]:
    """Environment variables that the backend's process needs for honest numerics; imports its plug-in module, no framework."""
    _require(name)
    return _manager(name).hook.polyamp_get_environment(name=name) or {}


def _require(name: str) -> BackendInfo:
    known = registered_backends()
    if name not in known:
        raise UnknownBackendError(f"no backend {name!r}; registered: {', '.join(known) or 'none'}. Install the distribution that provides it")
    return known[name]


def _manager(name: str) -> pluggy.PluginManager:
    import pluggy

    from polyamp import hookspecs

    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.load_setuptools_entrypoints(GROUP, name=name)
    return manager


def _info(entry: EntryPoint) -> BackendInfo:
    distribution = entry.dist.name if entry.dist else "unknown"
    version = entry.dist.version if entry.dist else "?"
    needs, extra = _FRAMEWORKS.get(entry.name, ((), "")) if distribution == "polyamp" else ((), "")
    missing = tuple(module for module in needs if find_spec(module) is None)
    install = f"pip install 'polyamp[{extra}]'" if extra else f"pip install --upgrade {distribution}"
    return BackendInfo(entry.name, distribution, version, entry.module, missing, install)
