"""The command line: `polyamp`, or `python -m polyamp`.

Rules
- click and rich are imported here and nowhere else in the core; a command's module is imported when that command runs.
- No command imports a framework; the ones that plug in through entry points may.
- Exit status: 0 done, 1 a comparison that found a difference, 2 anything that was asked for and can't be done.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Runs the command line on `sys.argv` and exits with its status."""
    from polyamp.cli.app import cli

    cli(prog_name="polyamp")
