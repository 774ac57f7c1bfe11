"""Command line: the picture that `trace plot` draws. Needs matplotlib, and runs where it is installed."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest

from polyamp import StepRecord, Trace

from .test_cli import invoke
from .test_cli_trace import make

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


SVG = "{http://www.w3.org/2000/svg}"


def texts(path: Path) -> list[str]:
    return ["".join(part.strip() for part in element.itertext()) for element in ElementTree.parse(path).iter(f"{SVG}text")]


def ticks(path: Path) -> int:
    """Number of tick marks of skipped steps: matplotlib draws them one by one, or one path that is used several times."""
    groups = (group for group in ElementTree.parse(path).iter(f"{SVG}g") if (group.get("id") or "").startswith("EventCollection"))
    return sum(len(list(group.iter(f"{SVG}use"))) or len(list(group.iter(f"{SVG}path"))) for group in groups)


def test_svg_has_the_title_the_traces_and_an_axis_of_powers_of_two(tmp_path: Path) -> None:
    make(tmp_path / "a.jsonl", init_scale=2.0**20)
    make(tmp_path / "b.jsonl", "..X..XXX...", init_scale=2.0**20)
    result = invoke("trace", "plot", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "-o", tmp_path / "out.svg", "--title", "Costs $5, not $6")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.output == f"wrote {tmp_path / 'out.svg'}\n"
    found = texts(tmp_path / "out.svg")
    assert "Costs $5, not $6" in found
    assert found.count("a (torch)") == found.count("b (torch)") == 2  # legend, and the row of ticks
    assert {"216", "217", "218", "219", "220"} <= set(found)  # 2 and its exponent


def test_each_skip_is_a_tick(tmp_path: Path) -> None:
    for events, count in [("......X.....", 1), ("XX.XX.XX.XX.", 8), ("...", 0)]:
        make(tmp_path / f"{count}.jsonl", events)
        assert invoke("trace", "plot", tmp_path / f"{count}.jsonl", "-o", tmp_path / f"{count}.svg").exit_code == 0
        assert ticks(tmp_path / f"{count}.svg") == count


def test_the_last_step_has_a_width_and_ends_at_the_scale_after_it(tmp_path: Path) -> None:
    make(tmp_path / "one.jsonl", "X")
    assert invoke("trace", "plot", tmp_path / "one.jsonl", "-o", tmp_path / "out.svg").exit_code == 0
    paths = [path.get("d") or "" for path in ElementTree.parse(tmp_path / "out.svg").iter(f"{SVG}path") if "#1f77b4" in (path.get("style") or "")]
    x, y = zip(*(map(float, point.split()) for point in paths[0].replace("M", "L").split("L") if point.strip()), strict=True)
    assert x[0] < x[-1]
    assert y[0] < y[-1]  # the y axis of a picture points down: the scale fell


def test_png_is_a_picture_of_some_size(tmp_path: Path) -> None:
    make(tmp_path / "a.jsonl")
    assert invoke("trace", "plot", tmp_path / "a.jsonl", "-o", tmp_path / "out.PNG").exit_code == 0
    data = (tmp_path / "out.PNG").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert width > 800
    assert height > 400


def test_the_same_traces_give_the_same_bytes(tmp_path: Path) -> None:
    make(tmp_path / "a.jsonl")
    for kind in ("png", "svg"):
        pictures = []
        for index in range(2):
            invoke("trace", "plot", tmp_path / "a.jsonl", "-o", tmp_path / f"{index}.{kind}")
            pictures.append((tmp_path / f"{index}.{kind}").read_bytes())
        assert pictures[0] == pictures[1]


def test_an_existing_picture_is_replaced_only_with_force(tmp_path: Path) -> None:
    make(tmp_path / "a.jsonl")
    target = tmp_path / "out.svg"
    target.write_text("precious")
    plot = ("trace", "plot", tmp_path / "a.jsonl", "-o", target)
    refused = invoke(*plot)
    assert refused.exit_code == 2
    assert "exists and is left as it is" in refused.stderr
    assert target.read_text() == "precious"
    assert invoke(*plot, "--force").exit_code == 0
    assert target.read_text().startswith("<?xml")


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    make(tmp_path / "a.jsonl")
    result = invoke("trace", "plot", tmp_path / "a.jsonl", "-o", tmp_path / "absent" / "out.svg")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_scales_without_a_place_on_a_log_axis_leave_a_gap(tmp_path: Path) -> None:
    scales = [8.0, 0.0, -1.0, math.inf, 4.0]
    records = tuple(StepRecord(step=i, scale=s, scale_after=s, skipped=False) for i, s in enumerate(scales))
    Trace({}, records).write(tmp_path / "odd.jsonl")
    Trace({}, ()).write(tmp_path / "_empty.jsonl")
    result = invoke("trace", "plot", tmp_path / "odd.jsonl", tmp_path / "_empty.jsonl", "-o", tmp_path / "out.svg")
    assert (result.exit_code, result.stderr) == (0, "")
    assert texts(tmp_path / "out.svg").count("_empty") == 2
