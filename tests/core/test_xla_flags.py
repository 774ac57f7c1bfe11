"""XLA flags: which are set, and that the user's own win (docs/spec.md, section 9.5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp.xla_flags import HONEST_FLAGS, honest_flags, merge_flags, xla_environment

ISA = "--xla_cpu_max_isa=AVX2"
EXCESS = "--xla_allow_excess_precision=false"
ALGSIMP = "--xla_disable_hlo_passes=algsimp"
YNN = "--xla_cpu_experimental_ynn_fusion_type="


@pytest.mark.parametrize(
    ("version", "machine", "expected"),
    [
        ("0.10.2", "x86_64", [ISA, EXCESS, ALGSIMP, YNN]),
        ("0.10.2", "AMD64", [ISA, EXCESS, ALGSIMP, YNN]),
        ("0.10.2", "aarch64", [EXCESS, ALGSIMP, YNN]),
        ("0.10.2.dev20260101+cuda12", "arm64", [EXCESS, ALGSIMP, YNN]),
        ("0.11.0", "x86_64", [ISA, EXCESS, ALGSIMP]),
        ("1.0.0", "x86_64", [ISA, EXCESS, ALGSIMP]),
        ("0.8.2", "x86_64", [ISA, EXCESS, ALGSIMP, YNN]),
        ("0.8.1", "x86_64", [ISA, EXCESS, ALGSIMP]),
        ("0.6.0", "x86_64", [ISA, EXCESS, ALGSIMP]),
        ("0.5.9", "x86_64", []),
        ("main", "x86_64", []),
        ("", "x86_64", []),
        (None, "x86_64", []),
    ],
)
def test_flags_are_gated_by_version_and_machine(version: str | None, machine: str, expected: list[str]) -> None:
    assert list(map(str, honest_flags(version, machine))) == expected


def test_what_the_user_set_wins_and_is_never_named_again() -> None:
    mine = "--xla_allow_excess_precision=true --xla_dump_to=folder"
    merged = xla_environment({"XLA_FLAGS": mine}, "0.10.2", "aarch64")["XLA_FLAGS"]
    assert merged == f"{mine} {ALGSIMP} {YNN}"


@given(st.lists(st.sampled_from([ISA, EXCESS, YNN, "--xla_other=1", "--xla_disable_hlo_passes=dce"]), unique=True))
def test_merging_twice_changes_nothing(words: list[str]) -> None:
    once = merge_flags(" ".join(words), HONEST_FLAGS)
    assert merge_flags(once, HONEST_FLAGS) == once
    names = [word.partition("=")[0] for word in once.split()]
    assert len(names) == len(set(names))
    assert once.split()[: len(words)] == words


def test_nothing_to_add_is_an_empty_environment() -> None:
    assert xla_environment({}, "0.5.0", "x86_64") == {}
    assert xla_environment({"XLA_FLAGS": f" {EXCESS} {ALGSIMP} {YNN}"}, "0.10.2", "aarch64") == {}
    assert xla_environment({"OTHER": "1"}, "0.10.2", "aarch64") == {"XLA_FLAGS": f"{EXCESS} {ALGSIMP} {YNN}"}
