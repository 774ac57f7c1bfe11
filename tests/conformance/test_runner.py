"""The runner: a broken backend is its own failure and no one else's; nothing is overwritten; the files say what happened."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from polyamp.cli.app import cli
from polyamp.errors import PolyampError
from polyamp.trace import Trace
from polyamp_conformance.cases.base import Status
from polyamp_conformance.results import RunResults
from polyamp_conformance.runner import Options, run
from polyamp_conformance.targets import check_target, folder_name, load_target

_HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _in_this_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(_HERE)  # broken_backends and saboteurs are found by module:attribute
    monkeypatch.setenv("PYTHONPATH", str(_HERE.parent))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResults, Path]:
    """One run with every kind of broken backend beside an honest one."""
    folder = tmp_path_factory.mktemp("broken") / "out"
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.chdir(_HERE)
    monkeypatch.setenv("PYTHONPATH", str(_HERE.parent))
    names = tuple(f"broken_backends:{name}" for name in ("Dies", "Hangs", "Raises", "DoesNotLoad"))
    honest = "polyamp_conformance.oracle.backend:OracleBackend"
    results = run(Options(directory=folder, backends=(*names, honest), families=("loss_scale",), timeout=15.0))
    monkeypatch.undo()
    return results, folder


def _statuses(results: RunResults, backend: str) -> dict[str, Status]:
    return {r.case.removeprefix("loss_scale/"): r.status for r in results.of(backend)}


def test_a_dead_process_fails_its_case_and_keeps_what_was_done(broken) -> None:
    results, _ = broken
    statuses = _statuses(results, "broken_backends:Dies")
    assert statuses["reference-events"] is Status.PASS
    assert statuses["static"] is Status.ERROR
    assert statuses["like-flax"] is Status.NOT_RUN
    message = next(r.message for r in results.of("broken_backends:Dies") if r.status is Status.ERROR)
    assert "exit status 7 in loss_scale/static: about to fall over" in message


def test_a_hang_is_ended_and_named(broken) -> None:
    results, _ = broken
    statuses = _statuses(results, "broken_backends:Hangs")
    assert statuses["reload-at-floor"] is Status.PASS
    assert statuses["static"] is Status.ERROR
    target = next(t for t in results.targets if t.name == "broken_backends:Hangs")
    assert target.message == "hung: no sign of life for 15 s in loss_scale/static"


def test_an_exception_is_one_case_and_unsupported_is_not_claimed(broken) -> None:
    results, _ = broken
    by_case = {r.case: r for r in results.of("broken_backends:Raises")}
    assert by_case["loss_scale/static"].status is Status.ERROR
    assert by_case["loss_scale/static"].message == "ZeroDivisionError: no such thing"
    assert by_case["loss_scale/none-checked"].status is Status.NOT_CLAIMED
    assert by_case["loss_scale/like-megatron"].status is Status.PASS


def test_a_backend_that_does_not_load_is_not_run(broken) -> None:
    results, _ = broken
    assert set(_statuses(results, "broken_backends:DoesNotLoad").values()) == {Status.NOT_RUN}
    assert "RuntimeError: driver too old" in results.of("broken_backends:DoesNotLoad")[0].message


def test_the_others_lose_nothing(broken) -> None:
    results, _ = broken
    honest = _statuses(results, "polyamp_conformance.oracle.backend:OracleBackend")
    assert set(honest.values()) == {Status.PASS}
    assert not results.green


def test_results_round_trip_and_junit_counts_agree(broken) -> None:
    results, folder = broken
    assert RunResults.read(folder) == results
    suites = {s.get("name"): s for s in ElementTree.parse(folder / "junit.xml").getroot()}
    dies = suites["broken_backends:Dies"]
    assert int(dies.get("tests")) == len(results.of("broken_backends:Dies"))
    assert int(dies.get("errors")) == sum(r.status in (Status.ERROR, Status.NOT_RUN) for r in results.of("broken_backends:Dies"))
    assert int(suites["broken_backends:Raises"].get("skipped")) == 1


def test_traces_name_case_backend_and_execution(broken) -> None:
    results, folder = broken
    result = results.of("broken_backends:Raises")[0]
    trace = Trace.read(folder / result.trace)
    assert trace.header["case"] == result.case
    assert trace.header["backend"] == "broken_backends:Raises"
    assert trace.header["execution"] == "eager"
    assert trace.footer["steps"] == len(trace.records)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["conformance", *arguments])


def test_report_of_a_bad_run_exits_with_1_and_is_one_self_contained_page(broken) -> None:
    _, folder = broken
    outcome = _run("report", str(folder))
    assert outcome.exit_code == 1
    assert "do not conform to the spec" in outcome.output
    assert "ZeroDivisionError: no such thing" in outcome.output
    page = (folder / "report.html").read_text("utf-8")
    assert "driver too old" in page
    for foreign in ("<script", "<link", "src=", "@import", "url(http"):
        assert foreign not in page


def test_saboteur_run_exits_with_1_and_shows_its_trajectory(tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = _run("run", "--backend", "saboteurs:GrowsLate", "--case", "training/digits-exact/seed-0", "-o", str(out))
    assert outcome.exit_code == 1, outcome.output
    assert "growth_interval off by one" in outcome.output
    page = (out / "report.html").read_text("utf-8")
    assert page.count("<svg") == 1
    assert "saboteurs:GrowsLate" in page[page.index("<svg") :]


def test_a_green_run_exits_with_0_and_is_not_replaced_unasked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("run", "--backend", "polyamp_conformance.oracle.backend:OracleBackend", "--case", "loss_scale/floor", "-o", str(out))
    first = _run(*arguments)
    assert first.exit_code == 0, first.output
    assert "all 2 results conform to the spec" in first.output
    before = (out / "results.jsonl").read_bytes()
    again = _run(*arguments)
    assert again.exit_code == 2
    assert "holds an earlier run; it is left as it is" in again.output
    assert (out / "results.jsonl").read_bytes() == before
    (out / "mine.txt").write_text("keep me")
    forced = _run(*arguments, "--force")
    assert forced.exit_code == 0, forced.output
    assert (out / "mine.txt").read_text() == "keep me"


def test_a_folder_of_someone_else_is_refused_even_with_force(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    outcome = _run("run", "--backend", "oracle", "--case", "loss_scale/floor", "-o", str(tmp_path), "--force")
    assert outcome.exit_code == 2
    assert "holds no earlier run" in outcome.output
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "nonesuch"), "no backend 'nonesuch'"),
        (("--case", "loss_scale/nonesuch"), "no case matches"),
        (("--family", "nonesuch"), "'nonesuch' is not one of"),
        (("--seed", "-1"), "-1"),
    ],
)
def test_bad_requests_exit_with_2_before_anything_runs(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    out = tmp_path / "out"
    outcome = _run("run", *arguments, "-o", str(out))
    assert outcome.exit_code == 2
    assert words in outcome.output
    assert not out.exists()


def test_claiming_nothing_is_not_green(tmp_path: Path) -> None:
    results = run(Options(directory=tmp_path / "out", backends=("saboteurs:ClaimsNothing",), patterns=("loss_scale/floor",)))
    assert [r.status for r in results.of("saboteurs:ClaimsNothing")] == [Status.NOT_CLAIMED]
    assert not results.green


def test_an_unclaimed_device_is_not_claimed(tmp_path: Path) -> None:
    honest = "polyamp_conformance.oracle.backend:OracleBackend"
    results = run(Options(directory=tmp_path / "out", backends=(honest,), device="tpu", patterns=("loss_scale/floor",)))
    assert [(r.status, r.message) for r in results.of(honest)] == [(Status.NOT_CLAIMED, f"{honest} does not claim device tpu")]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "is damaged"), ("{", "is damaged"), (json.dumps({"kind": "run"}) + "\n" + json.dumps({"kind": "target"}), "is damaged")],
)
def test_damaged_results_are_an_error(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "results.jsonl").write_text(text)
    outcome = _run("report", str(tmp_path))
    assert outcome.exit_code == 2
    assert words in outcome.output
    assert not (tmp_path / "report.html").exists()


def test_report_of_no_run_is_an_error(tmp_path: Path) -> None:
    outcome = _run("report", str(tmp_path))
    assert outcome.exit_code == 2
    assert "holds no results.jsonl" in outcome.output


def test_targets_by_module_and_attribute() -> None:
    assert load_target("broken_backends:Raises").name == "raises"
    assert folder_name("a.b:C d") == "a.b_C_d"
    check_target("oracle")
    with pytest.raises(PolyampError, match="has no 'Nonesuch'"):
        load_target("broken_backends:Nonesuch")
    with pytest.raises(PolyampError, match="lacks methods"):
        load_target("pathlib:Path")
