"""Failure: how the command line ends when it can't do what it was asked for."""

from __future__ import annotations

import click

__all__ = ["Failure"]


class Failure(click.ClickException):
    """One line on standard error and exit status 2, as for a usage error; 1 is kept for a difference that was found."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))
