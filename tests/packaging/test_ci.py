"""CI runs what the README tells a reader to run, and nothing else."""

from __future__ import annotations

from .conftest import ROOT


def test_ci_calls_the_commands_of_the_readme() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line.removesuffix(" || exit 1") for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert len(commands) == 2
    readme = [line.strip() for line in (ROOT / "README.md").read_text().splitlines()]
    assert [command for command in commands if command not in readme] == []


def test_every_pin_is_exact_and_no_index_is_named() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if line.count("==") != 1 or "://" in line or line.startswith("-")] == []
