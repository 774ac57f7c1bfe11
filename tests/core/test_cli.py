"""Command line: root group, `env` and `backends`, plugged-in commands, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import polyamp
import polyamp.cli.app
import polyamp.cli.env
import polyamp.registry
from polyamp.cli.app import cli

from .conftest import Install

PACKAGES = ("torch", "jax", "jaxlib", "keras", "tensorflow", "flax", "optax", "numpy", "ml_dtypes")


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], prog_name="polyamp")


def test_help_lists_every_command_and_imports_none_of_them(install: Install) -> None:
    install("mine-dist", {"polyamp.commands": {"mine": "mine_commands:mine"}}, {"mine_commands": "raise RuntimeError('imported')"})
    result = invoke("--help")
    assert result.exit_code == 0
    for name in ("backends", "conformance", "env", "trace", "mine"):
        assert f"\n  {name} " in result.output
    assert "Provided by mine-dist." in result.output
    assert "mine_commands" not in sys.modules


@pytest.mark.parametrize("command", ["env", "backends", "trace"])
def test_the_help_of_a_built_in_command_is_the_line_in_the_list(command: str) -> None:
    assert polyamp.cli.app._BUILT_IN[command][1] in invoke(command, "--help").output


def test_version() -> None:
    assert invoke("--version").output == f"polyamp, version {polyamp.__version__}\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    result = invoke("trase")
    assert result.exit_code == 2
    assert "No such command 'trase'" in result.stderr


@pytest.mark.parametrize("program", [[sys.executable, "-m", "polyamp"], [sys.executable, "-c", "from polyamp.cli import main; main()"]])
def test_an_error_of_the_program_is_one_line_and_status_2(program: list[str]) -> None:
    done = subprocess.run([*program, "trace", "show", "absent.jsonl"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: can't read trace absent.jsonl: No such file or directory\n"


def test_debug_shows_the_traceback() -> None:
    program = [sys.executable, "-m", "polyamp", "trace", "show", "absent.jsonl"]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, "POLYAMP_DEBUG": "1"})
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "TraceError" in done.stderr


def test_env_json_tells_versions_without_importing_anything() -> None:
    code = (
        "import sys\nfrom polyamp.cli.app import cli\n"
        "try:\n    cli(['env', '--json'])\nfinally:\n"
        f"    assert not set({PACKAGES!r}) & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["polyamp"]["polyamp"] == polyamp.__version__
    assert document["polyamp"]["python"].endswith(".".join(map(str, sys.version_info[:3])))
    assert set(PACKAGES) <= set(document["packages"])


def test_env_shows_versions_variables_and_the_processor(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Test CPU\nflags\t\t: fpu avx2 f16c avx512_fp16\n\nmodel name\t: Other CPU\n")
    monkeypatch.setattr(polyamp.cli.env, "_CPUINFO", cpuinfo)
    monkeypatch.setattr(polyamp.cli.env, "PACKAGES", ("mine-dist", "absent-dist"))
    install("mine-dist", {}, version="9.8.7")
    for name in polyamp.cli.env.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    result = invoke("env")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert "cpu: Test CPU" in lines
    assert "cpu features: f16c avx2 avx512_fp16" in lines
    assert "mine-dist: 9.8.7" in lines
    assert "absent-dist: not installed" in lines
    assert lines[lines.index("[environment]") :] == ["[environment]", "XLA_FLAGS: --xla_cpu_max_isa=AVX2"]
    assert "secret" not in result.output


def test_env_works_where_nothing_can_be_probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(polyamp.cli.env, "_CPUINFO", tmp_path / "absent")
    monkeypatch.setenv("PATH", str(tmp_path))
    result = invoke("env")
    assert result.exit_code == 0
    assert "cpu features: unknown" in result.output.splitlines()
    assert "gpu: no NVIDIA driver found" in result.output.splitlines()


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")
@pytest.mark.parametrize(("status", "expected"), [(0, "gpu: GPU A, 1.2; GPU B, 1.2"), (9, "gpu: no NVIDIA driver found")])
def test_env_names_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, expected: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho 'GPU A, 1.2'\necho 'GPU B, 1.2'\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert expected in invoke("env").output.splitlines()


def test_backends_without_any_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polyamp.registry, "find_spec", lambda module: None)
    result = invoke("backends")
    assert result.exit_code == 0
    for name, extra in [("torch", "torch"), ("jax", "jax"), ("keras-tensorflow", "tensorflow"), ("keras-jax", "keras,jax")]:
        (line,) = [line for line in result.output.splitlines() if line.split()[:1] == [name]]
        assert f"pip install 'polyamp[{extra}]'" in line
    assert "pip install 'polyamp[all]'" in result.output


def test_backends_tells_what_is_installed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("mine-dist", {"polyamp": {"mine": "absent_module"}}, version="3.4")
    monkeypatch.setattr(polyamp.registry, "find_spec", lambda module: None if module == "jax" else object())
    lines = [line.split() for line in invoke("backends").output.splitlines()]
    assert ["mine", "mine-dist", "3.4", "installed"] in lines
    assert ["torch", "polyamp", polyamp.__version__, "installed"] in lines
    assert not any("polyamp[all]" in word for line in lines for word in line)
    document = json.loads(invoke("backends", "--json").output)
    by_name = {entry["name"]: entry for entry in document}
    assert by_name["keras-jax"] == {
        "name": "keras-jax",
        "distribution": "polyamp",
        "version": polyamp.__version__,
        "module": "polyamp_keras.plugin",
        "missing": ["jax"],
        "install": "pip install 'polyamp[keras,jax]'",
        "available": False,
    }
    assert by_name["mine"]["available"] is True


def test_markup_in_metadata_is_shown_as_it_is(install: Install) -> None:
    install("mine-dist", {"polyamp": {"[bold]mine": "absent_module"}})
    assert "[bold]mine" in invoke("backends").output


def test_two_distributions_of_one_backend_name(install: Install) -> None:
    install("first-dist", {"polyamp": {"mine": "m"}})
    install("second-dist", {"polyamp": {"mine": "m"}})
    result = invoke("backends")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: backend 'mine' is registered twice: by ")
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in ("first-dist", "second-dist"))


COMMANDS = {"polyamp.commands": {"mine": "mine_commands:mine"}}
SOURCE = """
import click
from polyamp.errors import MisuseError

@click.group()
def mine():
    "Group of another distribution."

@mine.command()
@click.argument("word")
def say(word):
    if word == "fail":
        raise MisuseError("first line\\nsecond line")
    click.echo(f"said {word}")
"""


def test_a_command_of_another_distribution_runs(install: Install) -> None:
    install("mine-dist", COMMANDS, {"mine_commands": SOURCE})
    assert invoke("mine", "say", "yes").output == "said yes\n"
    assert "Group of another distribution." in invoke("mine", "--help").output


def test_its_polyamp_errors_are_one_line_too(install: Install) -> None:
    install("mine-dist", COMMANDS, {"mine_commands": SOURCE})
    result = invoke("mine", "say", "fail")
    assert (result.exit_code, result.stderr) == (2, "Error: first line second line\n")


def test_a_command_whose_requirement_is_missing_says_how_to_install_it(install: Install) -> None:
    install("mine-dist", COMMANDS, {"mine_commands": "import a_module_of_tomorrow"})
    result = invoke("mine")
    assert result.exit_code == 2
    assert result.stderr == "Error: command 'mine' needs a_module_of_tomorrow, which is not installed; run: pip install --upgrade mine-dist\n"


def test_the_conformance_suite_without_its_requirements_names_the_extra(install: Install) -> None:
    source = {"suite": "import a_module_of_tomorrow"}
    install("polyamp", {"polyamp.commands": {"conformance": "suite:conformance"}}, source, version=polyamp.__version__)
    assert "Run the conformance suite" in invoke("--help").output
    result = invoke("conformance", "run")
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: command 'conformance' needs a_module_of_tomorrow, which is not installed; run: pip install 'polyamp[conformance]'\n"
    )


def test_a_requirement_that_is_missing_only_when_the_command_runs(install: Install) -> None:
    install("mine-dist", COMMANDS, {"mine_commands": SOURCE.replace('if word == "fail":', "import a_module_of_tomorrow\n    if word:")})
    result = invoke("mine", "say", "yes")
    assert result.exit_code == 2
    assert "needs a_module_of_tomorrow, which is not installed; run: pip install --upgrade mine-dist" in result.stderr


@pytest.mark.parametrize("source", ["import mine_commands.absent", "from json import absent", "raise ImportError('libx.so.1')"])
def test_any_other_import_error_of_a_command_surfaces(install: Install, source: str) -> None:
    install("mine-dist", COMMANDS, {"mine_commands": source})
    assert isinstance(invoke("mine").exception, ImportError)


def test_an_entry_that_is_no_command_is_an_error(install: Install) -> None:
    install("mine-dist", COMMANDS, {"mine_commands": "mine = 42"})
    result = invoke("mine")
    assert result.exit_code == 2
    assert "mine_commands:mine of mine-dist registers command 'mine', but is a int" in result.stderr


def test_two_distributions_of_one_command_name(install: Install) -> None:
    install("first-dist", COMMANDS, {"mine_commands": SOURCE})
    install("second-dist", COMMANDS)
    assert invoke("--help").exit_code == 0
    result = invoke("mine")
    assert result.exit_code == 2
    assert all(word in result.stderr for word in ("'mine'", "first-dist", "second-dist", "uninstall one"))


def test_a_built_in_command_is_never_replaced(install: Install) -> None:
    install("mine-dist", {"polyamp.commands": {"env": "mine_commands:mine"}}, {"mine_commands": SOURCE})
    assert "[machine]" in invoke("env").output
