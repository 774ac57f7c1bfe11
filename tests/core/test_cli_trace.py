"""Command line: `trace show` and `trace diff`, and what `trace plot` refuses."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from polyamp import LossScale, StepRecord, Trace

from .test_cli import invoke

HEADER = {"backend": "torch", "versions": {"torch": "2.13"}, "seed": 7}


def make(path: Path, events: str = "..X...XX...", *, init_scale: float = 8.0, digests: bool = True) -> Trace:
    """Writes the trace of a run with growth interval 3."""
    config = LossScale.dynamic(init_scale=init_scale, growth_interval=3)
    state, records = config.init(), []
    for step, event in enumerate(events):
        after = config.update(state, event == ".")
        skipped = event == "X"
        digest = f"{after.steps}-{after.skipped}" if digests else None
        records.append(
            StepRecord(
                step=step,
                scale=state.scale,
                scale_after=after.scale,
                skipped=skipped,
                reason="overflow" if skipped else None,
                loss=1 / (step + 1),
                digest=digest,
            )
        )
        state = after
    Trace(HEADER, tuple(records)).write(path)
    return Trace.read(path)


def rows(output: str) -> list[list[str]]:
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.split()[:1] == ["step"])
    return [line.split() for line in lines[start + 2 :]]


def test_show(tmp_path: Path) -> None:
    make(tmp_path / "t.jsonl")
    result = invoke("trace", "show", tmp_path / "t.jsonl", "--rows", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.output.splitlines()
    assert lines[:3] == ["backend: torch", 'versions: {"torch": "2.13"}', "seed: 7"]
    assert "steps: 11" in lines
    assert "skipped: 3 (3 overflow): 2 6-7" in lines
    assert "scale: 8 at first, 2 to 8, 4 at last" in lines
    assert rows(result.output) == [
        ["0", "8", "8", "1"],
        ["1", "8", "8", "0.5"],
        ["..."] * 5,
        ["9", "2", "2", "0.1"],
        ["10", "2", "4", "0.0909091"],
    ]


def test_show_prints_every_row_of_a_short_trace_or_on_request(tmp_path: Path) -> None:
    make(tmp_path / "t.jsonl")
    for arguments in (["--rows", "6"], ["--rows", "1", "--all"]):
        found = rows(invoke("trace", "show", tmp_path / "t.jsonl", *arguments).output)
        assert [row[0] for row in found] == [str(step) for step in range(11)]
        assert found[2] == ["2", "8", "4", "overflow", "0.333333"]
    assert "step " not in invoke("trace", "show", tmp_path / "t.jsonl", "--rows", "0").output


@pytest.mark.parametrize(
    ("scale", "text"),
    [(2.0**20, "1048576"), (2.0**44, "2^44"), (2.0**-24, "2^-24"), (0.5, "2^-1"), (3.0, "3"), (0.10000000149011612, "0.100000001"), (0.0, "0")],
)
def test_show_writes_a_scale_exactly(tmp_path: Path, scale: float, text: str) -> None:
    Trace({}, (StepRecord(step=0, scale=scale, scale_after=scale, skipped=False),)).write(tmp_path / "t.jsonl")
    assert rows(invoke("trace", "show", tmp_path / "t.jsonl").output) == [["0", text, text]]


def test_show_counts_reasons_and_shortens_a_long_list_of_skips(tmp_path: Path) -> None:
    records = [StepRecord(step=i, scale=1.0, scale_after=1.0, skipped=i % 2 == 0, reason=[None, "nan"][i % 4 == 0]) for i in range(100)]
    Trace({}, tuple(records)).write(tmp_path / "t.jsonl")
    (line,) = [line for line in invoke("trace", "show", tmp_path / "t.jsonl").output.splitlines() if line.startswith("skipped")]
    assert line.startswith("skipped: 50 (25 nan, 25 no reason recorded): 0 2 4 ")
    assert line.endswith(" 76 78 and 10 more runs")


def test_show_a_trace_without_steps(tmp_path: Path) -> None:
    Trace(HEADER, ()).write(tmp_path / "t.jsonl")
    result = invoke("trace", "show", tmp_path / "t.jsonl")
    assert result.exit_code == 0
    assert result.output.splitlines()[-2:] == ["steps: 0", "skipped: 0"]


def test_show_says_that_a_trace_is_truncated(tmp_path: Path) -> None:
    make(tmp_path / "t.jsonl")
    data = (tmp_path / "t.jsonl").read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(data[: data.rindex(b'"step":10') + 3])
    result = invoke("trace", "show", tmp_path / "cut.jsonl")
    assert result.exit_code == 0
    assert "steps: 10" in result.stdout.splitlines()
    assert result.stderr == f"note: {tmp_path / 'cut.jsonl'} is truncated: its last line is half-written and left out\n"


def test_show_says_that_a_trace_has_no_footer_or_a_wrong_one(tmp_path: Path) -> None:
    make(tmp_path / "t.jsonl")
    lines = (tmp_path / "t.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "open.jsonl").write_bytes(b"".join(lines[:-1]))
    assert "no footer" in invoke("trace", "show", tmp_path / "open.jsonl").stderr
    (tmp_path / "lost.jsonl").write_bytes(b"".join(lines[:3] + lines[4:]))
    assert "footer: counts 11 steps, the file holds 10" in invoke("trace", "show", tmp_path / "lost.jsonl").output


@pytest.mark.parametrize("command", ["show", "diff", "plot"])
@pytest.mark.parametrize(("content", "words"), [(None, "can't read"), (b"garbage\n", "line 1 is damaged"), (b"", "no whole line")])
def test_what_can_not_be_read_is_one_line_and_status_2(tmp_path: Path, command: str, content: bytes | None, words: str) -> None:
    make(tmp_path / "good.jsonl")
    bad = tmp_path / "bad.jsonl"
    if content is not None:
        bad.write_bytes(content)
    more = {"show": [], "diff": [tmp_path / "good.jsonl"], "plot": ["-o", tmp_path / "out.svg"]}[command]
    result = invoke("trace", command, bad, *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert str(bad) in result.stderr
    assert not (tmp_path / "out.svg").exists()


def test_diff_of_traces_that_agree(tmp_path: Path) -> None:
    make(tmp_path / "a.jsonl")
    make(tmp_path / "b.jsonl", digests=False)
    result = invoke("trace", "diff", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert (result.exit_code, result.output) == (0, "scale and skips agree over 11 steps, 3 of them skipped\n")


@pytest.mark.parametrize(
    ("events", "scale", "words"),
    [
        ("..X..XXX...", 8.0, ["step 5: skipped is False", "True in the second"]),
        ("..X...XX...", 4.0, ["step 0: scale is 8.0", "4.0 in the second", "another scale"]),
        ("..X...XX..", 8.0, ["step 10: length is 11", "10 in the second", "ends here"]),
    ],
)
def test_diff_names_the_first_diverging_step_and_why(tmp_path: Path, events: str, scale: float, words: list[str]) -> None:
    make(tmp_path / "a.jsonl")
    make(tmp_path / "b.jsonl", events, init_scale=scale)
    result = invoke("trace", "diff", tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert result.exit_code == 1
    assert [word for word in [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), *words] if word not in result.output] == []


def test_diff_masters(tmp_path: Path) -> None:
    trace = make(tmp_path / "a.jsonl")
    moved = replace(trace, records=(*trace.records[:-1], replace(trace.records[-1], digest="moved")))
    moved.write(tmp_path / "moved.jsonl")
    make(tmp_path / "none.jsonl", digests=False)
    diff = ("trace", "diff", "--masters", tmp_path / "a.jsonl")
    same = invoke(*diff, tmp_path / "a.jsonl")
    assert (same.exit_code, same.output) == (0, "scale, skips and master weights agree over 11 steps, 3 of them skipped\n")
    other = invoke(*diff, tmp_path / "moved.jsonl")
    assert other.exit_code == 1
    assert "step 10: digest is 11-3 in the first trace and moved in the second" in other.output
    absent = invoke(*diff, tmp_path / "none.jsonl")
    assert (absent.exit_code, absent.stdout) == (2, "")
    assert "none.jsonl has no digest" in absent.stderr


def test_plot_without_matplotlib_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "a.jsonl")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("trace", "plot", tmp_path / "a.jsonl", "-o", tmp_path / "out.png")
    assert result.exit_code == 2
    assert result.stderr == "Error: drawing needs matplotlib, which is not installed; run: pip install 'polyamp[plot]'\n"
    assert not (tmp_path / "out.png").exists()


@pytest.mark.parametrize("name", ["out.pdf", "out", "png", "out.png.txt"])
def test_plot_refuses_other_kinds_of_picture(tmp_path: Path, name: str) -> None:
    make(tmp_path / "a.jsonl")
    result = invoke("trace", "plot", tmp_path / "a.jsonl", "-o", tmp_path / name)
    assert result.exit_code == 2
    assert ".png or .svg" in result.stderr


def test_plot_needs_traces_and_an_output(tmp_path: Path) -> None:
    make(tmp_path / "a.jsonl")
    assert invoke("trace", "plot", "-o", tmp_path / "out.svg").exit_code == 2
    assert invoke("trace", "plot", tmp_path / "a.jsonl").exit_code == 2
