"""The root command group: built-in commands, and further ones from the entry-point group `polyamp.commands`.

Rules
- Listing commands imports none of them: the built-in ones carry their one-line help here, the others are listed from metadata.
- A built-in command is never replaced by an entry point of its name. Two distributions that offer one name are an error that names both.
- Every `PolyampError` ends the program with its message on one line and status 2. With POLYAMP_DEBUG=1 it is raised, traceback and all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any

import click

from polyamp import __version__
from polyamp.cli.failure import Failure
from polyamp.errors import PolyampError

__all__ = ["cli"]

GROUP = "polyamp.commands"

_BUILT_IN = {
    "backends": ("polyamp.cli.backends", "List the backends, and how to install what they need."),
    "env": ("polyamp.cli.env", "Describe this machine and its packages, for a bug report."),
    "trace": ("polyamp.cli.trace", "Show, compare and plot traces."),
}
_EXTRAS = {"conformance": ("conformance", "Run the conformance suite, report on it, compare results.")}


class CommandLine(click.Group):
    """Group that imports a command when it is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_BUILT_IN, *_plugged_in()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _BUILT_IN:
            command: click.Command = getattr(import_module(_BUILT_IN[cmd_name][0]), cmd_name)
            return command
        entries = _plugged_in().get(cmd_name)
        return _load(cmd_name, entries) if entries else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        plugged_in = _plugged_in()
        rows = [(name, _BUILT_IN[name][1] if name in _BUILT_IN else _summary(name, plugged_in[name])) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PolyampError as error:
            if os.environ.get("POLYAMP_DEBUG") == "1":
                raise
            raise Failure(str(error)) from error
        except ModuleNotFoundError as error:  # a plugged-in command that imports what it needs when it runs
            _raise_if_not_installed(error, ctx.invoked_subcommand or "", _plugged_in().get(ctx.invoked_subcommand or "", []))
            raise


@click.group(cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="polyamp")
def cli() -> None:
    """Mixed-precision training with one written spec and the same behaviour on PyTorch, JAX and Keras 3.

    \b
    Exit status: 0 done, 1 a comparison found a difference, 2 an error.
    POLYAMP_DEBUG=1 shows the traceback of an error.
    """


def _plugged_in() -> Mapping[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        found.setdefault(entry.name, []).append(entry)
    return found


def _load(name: str, entries: list[EntryPoint]) -> click.Command:
    if len(entries) > 1:
        owners = " and by ".join(f"{_owner(entry)} ({entry.value})" for entry in entries)
        raise Failure(f"command {name!r} is registered twice: by {owners}; uninstall one of them")
    entry = entries[0]
    try:
        command = entry.load()
    except ModuleNotFoundError as error:
        _raise_if_not_installed(error, name, entries)
        raise
    if not isinstance(command, click.Command):
        raise Failure(f"{entry.value} of {_owner(entry)} registers command {name!r}, but is a {type(command).__name__}; expected a click command")
    return command


def _raise_if_not_installed(error: ModuleNotFoundError, name: str, entries: list[EntryPoint]) -> None:
    """Raises the error with the install command, unless a plug-in lacks a module of its own or of a package that is installed."""
    missing = (error.name or "").partition(".")[0]
    for entry in entries:
        if missing and missing != entry.module.partition(".")[0] and find_spec(missing) is None:
            raise Failure(f"command {name!r} needs {missing}, which is not installed; run: {_install(name, entry)}") from error


def _summary(name: str, entries: list[EntryPoint]) -> str:
    if name in _EXTRAS and _owner(entries[0]) == "polyamp":
        return _EXTRAS[name][1]
    return f"Provided by {', '.join(_owner(entry) for entry in entries)}."


def _install(name: str, entry: EntryPoint) -> str:
    owner = _owner(entry)
    if owner == "polyamp" and name in _EXTRAS:
        return f"pip install 'polyamp[{_EXTRAS[name][0]}]'"
    return f"pip install --upgrade {owner}"


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "unknown"
