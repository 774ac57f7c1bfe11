"""`polyamp backends`: what is registered, what is installed, and the command that installs the rest.

Reads metadata only: it works, and exits with 0, where no framework is installed.
"""

from __future__ import annotations

from dataclasses import asdict

import click

from polyamp.registry import registered_backends

__all__ = ["backends"]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list instead of a table.")
def backends(as_json: bool) -> None:
    """List the backends, and how to install what they need."""
    from polyamp.cli.output import print_json, print_table

    infos = list(registered_backends().values())
    if as_json:
        print_json([{**asdict(info), "available": info.available} for info in infos])
        return
    rows = [
        (info.name, info.distribution, info.version, "installed" if info.available else f"needs {', '.join(info.missing)}: {info.install}")
        for info in infos
    ]
    if rows:
        print_table(("backend", "distribution", "version", "status"), rows)
    if not any(info.available for info in infos):
        click.echo("No backend can run here: install one with the command beside it, or all of them with: pip install 'polyamp[all]'")
