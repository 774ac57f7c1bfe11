"""Trace: writing, reading after a crash, refusing to overwrite (docs/spec.md, section 6)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import StepRecord, Trace, TraceError

HEADER = {"backend": "torch", "versions": {"torch": "2.13"}, "seed": 7, "policy": "params=float32"}
RECORDS = (
    StepRecord(step=0, scale=8.0, scale_after=4.0, skipped=True, reason="overflow", loss=math.inf),
    StepRecord(step=1, scale=4.0, scale_after=4.0, skipped=True, reason="nan", loss=math.nan, values={"headroom": -math.inf, "größe": 0.1}),
    StepRecord(step=2, scale=4.0, scale_after=8.0, skipped=False, loss=0.1, digest="a1b2"),
)


def write(path: Path, records: tuple[StepRecord, ...] = RECORDS) -> bytes:
    Trace(HEADER, records).write(path)
    return path.read_bytes()


def same(a: StepRecord, b: StepRecord) -> bool:
    return repr(a) == repr(b)  # repr, because NaN differs from itself


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl")
    trace = Trace.read(tmp_path / "t.jsonl")
    assert trace.header == HEADER
    assert list(map(repr, trace.records)) == list(map(repr, RECORDS))
    assert trace.footer == {"steps": 3, "skipped": 2, "final_scale": 8.0}
    assert trace.truncated is False
    assert trace.skips == (0, 1)


numbers = st.floats(width=32)


@given(
    st.lists(
        st.builds(
            StepRecord,
            step=st.integers(0, 2**31),
            scale=st.floats(min_value=2.0**-100, max_value=2.0**100, width=32),
            scale_after=numbers,
            skipped=st.booleans(),
            reason=st.sampled_from([None, "overflow", "nan", "forward", "no_gradients", "injected"]),
            loss=st.none() | st.floats(),
            digest=st.none() | st.text(max_size=5),
            values=st.dictionaries(st.text(max_size=4), numbers, max_size=3),
        ),
        max_size=4,
    )
)
def test_any_record_survives(tmp_path_factory: pytest.TempPathFactory, records: list[StepRecord]) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    write(path, tuple(records))
    assert list(map(repr, Trace.read(path).records)) == list(map(repr, records))


def test_every_line_is_strict_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    lines = [json.loads(line, parse_constant=refuse) for line in write(tmp_path / "t.jsonl").splitlines()]
    assert [line["kind"] for line in lines] == ["header", "step", "step", "step", "footer"]
    assert lines[0]["schema"] == 1
    assert (lines[1]["loss"], lines[2]["loss"], lines[2]["values"]["headroom"]) == ("inf", "nan", "-inf")


class Scalar:
    """Stands for a 0-d array or tensor: numpy, torch, JAX and TF scalars all have `tolist`."""

    def __init__(self, value: float | bool) -> None:
        self.value = value

    def __bool__(self) -> bool:
        return bool(self.value)

    def __radd__(self, other: int) -> int:
        return other + int(self.value)

    def tolist(self) -> float | bool:
        return self.value


def test_scalars_of_a_framework_are_written_as_numbers(tmp_path: Path) -> None:
    record: Any = StepRecord(step=0, scale=Scalar(8.0), scale_after=Scalar(math.inf), skipped=Scalar(True), values={"amax": Scalar(0.5)})  # type: ignore[arg-type]
    write(tmp_path / "t.jsonl", (record,))
    (read,) = Trace.read(tmp_path / "t.jsonl").records
    assert read == StepRecord(step=0, scale=8.0, scale_after=math.inf, skipped=True, values={"amax": 0.5})


def test_a_trace_cut_at_any_byte_reads_up_to_its_last_whole_line(tmp_path: Path) -> None:
    data = write(tmp_path / "t.jsonl")
    path = tmp_path / "cut.jsonl"
    ends = [index + 1 for index, byte in enumerate(data) if byte == ord("\n")]
    for length in range(ends[0], len(data)):
        path.write_bytes(data[:length])
        trace = Trace.read(path)
        whole = sum(end <= length for end in ends)
        assert len(trace.records) == whole - 1
        assert all(map(same, trace.records, RECORDS))
        assert trace.truncated is (length not in ends)
        assert trace.footer is None


def test_a_trace_cut_inside_its_header_is_an_error(tmp_path: Path) -> None:
    data = write(tmp_path / "t.jsonl")
    path = tmp_path / "cut.jsonl"
    for length in range(data.index(b"\n") + 1):
        path.write_bytes(data[:length])
        with pytest.raises(TraceError, match="no whole line"):
            Trace.read(path)


STEP = b'{"kind":"step","step":0,"scale":1,"scale_after":1,"skipped":false}'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"kind":"step","step":', ["damaged"]),
        (b"\xff\xfe", ["damaged"]),
        (b"", ["damaged"]),
        (b"[" * 100_000, ["damaged"]),
        (b"[1, 2]", ["expected a JSON object", "list"]),
        (b"null", ["expected a JSON object", "NoneType"]),
        (b'{"kind":"header","schema":1}', ["not a step", "header"]),
        (b'{"kind":"footer","steps":1}', ["not a step", "footer"]),
        (b'{"kind":"step","step":0,"scale":1,"scale_after":1}', ["not a step", "skipped"]),
        (STEP.replace(b"false", b"0"), ["skipped a bool"]),
        (STEP.replace(b'"step":0', b'"step":0.5'), ["step must be an integer"]),
        (STEP.replace(b'"step":0', b'"step":true'), ["step must be an integer"]),
        (STEP.replace(b'"scale":1', b'"scale":"eight"'), ["eight"]),
        (STEP.replace(b'"scale":1', b'"scale":[1]'), ["not a step"]),
        (STEP.replace(b'"scale":1', b'"scale":1' + b"0" * 400), ["not a step"]),
        (STEP.replace(b"}", b',"values":[1]}'), ["not a step"]),
        (STEP.replace(b"}", b',"values":{"a":null}}'), ["not a step"]),
    ],
    ids=str,
)
def test_a_damaged_line_is_an_error_that_names_it(tmp_path: Path, line: bytes, words: list[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"kind":"header","schema":1}\n' + STEP + b"\n" + line + b"\n" + STEP + b"\n")
    with pytest.raises(TraceError) as caught:
        Trace.read(path)
    assert [word for word in ["line 3", str(path), *words] if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["no whole line"]),
        (b'{"step": 1}\n', ["line 1", "header"]),
        (b'{"kind":"header","schema":99}\n', ["schema 99", "reads 1", "upgrade"]),
        (b'{"kind":"header"}\n', ["schema None"]),
        (b"\x89PNG\r\n\x1a\n", ["line 1", "damaged"]),
    ],
)
def test_what_is_no_trace_is_an_error(tmp_path: Path, data: bytes, words: list[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        Trace.read(path)
    assert [word for word in words if word not in str(caught.value)] == []


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(TraceError, match="can't read trace"):
            Trace.read(path)


def test_unknown_fields_of_a_step_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"kind":"header","schema":1}\n' + STEP.replace(b"}", b',"of_tomorrow":1}') + b"\n")
    assert Trace.read(path).records == (StepRecord(step=0, scale=1.0, scale_after=1.0, skipped=False),)


def test_an_existing_file_is_never_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("precious")
    with pytest.raises(TraceError, match="exists and is left as it is"):
        Trace.writer(path)
    assert path.read_text() == "precious"
    with Trace.writer(path, overwrite=True):
        pass
    assert Trace.read(path).records == ()


def test_missing_folders_are_made_and_a_file_in_their_place_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "t.jsonl")
    (tmp_path / "file").write_text("precious")
    with pytest.raises(TraceError, match="can't create the folder"):
        Trace.writer(tmp_path / "file" / "t.jsonl")
    with pytest.raises(TraceError, match="can't create trace"):
        Trace.writer(tmp_path, overwrite=True)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_header_can_not_replace_the_keys_of_the_format(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="kind, schema"):
        Trace.writer(tmp_path / "t.jsonl", {"kind": "mine", "schema": 2})
    assert not (tmp_path / "t.jsonl").exists()


def test_an_unknown_reason_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with Trace.writer(tmp_path / "t.jsonl") as writer:
        with pytest.raises(TraceError, match=r"'tired'.*overflow, nan, forward, no_gradients, injected"):
            writer.append(StepRecord(step=0, scale=1.0, scale_after=1.0, skipped=True, reason="tired"))
        writer.append(RECORDS[0])
    trace = Trace.read(tmp_path / "t.jsonl")
    assert len(trace.records) == 1
    assert trace.footer == {"steps": 1, "skipped": 1, "final_scale": 4.0}


def test_each_record_is_on_the_disk_before_the_next_one_comes(tmp_path: Path) -> None:
    with Trace.writer(tmp_path / "t.jsonl", HEADER) as writer:
        assert Trace.read(tmp_path / "t.jsonl").header == HEADER
        for count, record in enumerate(RECORDS, 1):
            writer.append(record)
            assert len(Trace.read(tmp_path / "t.jsonl").records) == count


def test_a_run_that_fails_leaves_a_trace_without_a_footer(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"

    def fail_in_the_middle() -> None:
        with Trace.writer(path, HEADER) as writer:
            writer.extend(RECORDS)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle()
    trace = Trace.read(path)
    assert trace.footer is None
    assert trace.truncated is False
    assert len(trace.records) == 3


def test_closing_twice_writes_one_footer(tmp_path: Path) -> None:
    writer = Trace.writer(tmp_path / "t.jsonl")
    writer.close()
    writer.close()
    assert Trace.read(tmp_path / "t.jsonl").footer == {"steps": 0, "skipped": 0, "final_scale": None}
