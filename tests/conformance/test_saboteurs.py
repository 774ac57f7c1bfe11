"""The suite fails bad code: each saboteur, by the cases that were made for it, and in words that name what is wrong."""

from __future__ import annotations

import re

import pytest
from saboteurs import SABOTEURS

from polyamp.backend import Backend
from polyamp_conformance.cases import Case
from polyamp_conformance.cases.base import Status
from polyamp_conformance.oracle.backend import OracleBackend

_EXACT = "training/digits-exact/seed-0"
_TINY = "training/digits-exact/tiny-0"
_SGD, _ADAMW = "training/digits-mlp-sgd/replay", "training/digits-mlp-adamw/replay"
_INJECT = "training/digits-mlp-sgd/injection"

# Saboteur -> case -> what its message has to say. A case that only some saboteurs fail is what tells them apart.
CAUGHT: dict[str, dict[str, str]] = {
    "NeverSkips": {_EXACT: "was not skipped", _SGD: "was not skipped", _INJECT: "injected overflow was not skipped"},
    "FirstGradientOnly": {"step/each-leaf-inf": "check misses a tensor", _INJECT: "not skipped"},
    "LastGradientUnchecked": {"step/each-leaf-nan": "check misses a tensor", _INJECT: "not skipped", _EXACT: "not skipped"},
    "InfOnly": {"step/each-leaf-nan": "kind of value", _INJECT: "kind of value"},
    "SumCheck": {"step/large-finite": "false alarm"},
    "RawCheckOnly": {"step/unscaled-overflow": "not skipped"},
    "GrowsLate": {"loss_scale/reference-events": "growth", _EXACT: "growth", _SGD: "growth", _ADAMW: "growth", _INJECT: "growth"},
    "EqualityGrowth": {"loss_scale/lowered-interval": "growth"},
    "LosesFloorOnReload": {"loss_scale/reload-at-floor": "floor that was lost"},
    "ClipsAtCeiling": {"loss_scale/ceiling-not-clipped": "ceiling"},
    "RefillsEarly": {"loss_scale/hysteresis-refill-growth": "hysteresis", "loss_scale/like-megatron": "hysteresis"},
    "MomentumMovesOnSkip": {"step/transaction-sgd": "moved on a skipped step", _EXACT: "slots", _SGD: "moved", _ADAMW: "moved", _INJECT: "moved"},
    "StepCountMovesOnSkip": {"step/transaction-adamw": "step count", _ADAMW: "step count", _INJECT: "step count"},
    "DecaysOnSkip": {"step/transaction-sgd": "skipped step moved the weights", _EXACT: "moved the weights", _SGD: "moved", _INJECT: "moved"},
    "ZeroesBadGradients": {"step/transaction-sgd": "moved", _EXACT: "moved", _SGD: "step count|moved", _ADAMW: "step count|moved"},
    "UnscalesWithNewScale": {"step/unscale-before-growth": "unscaling", _EXACT: "unscaling", _SGD: r"2\^-1 of what it should be"},
    "UnscalesInFloat16": {_TINY: "unscaling"},
    "Float16Masters": {_EXACT: "master precision", _SGD: "masters kept in 16 bits"},
    "ClipsBeforeUnscaling": {"step/transaction-sgd": "unscal", _EXACT: "unscaling", _SGD: "unscaled"},
    "UpdatesPerTensorGroup": {_EXACT: "backoff differs", _SGD: "backoff differs", _INJECT: "backoff|growth"},
    "SaturatesOverflow": {_EXACT: "saturated", _SGD: "saturated"},
    "ForgetsCounterOnRestore": {"loss_scale/reload-every-step": "not restored", _SGD: "not restored|counter"},
    "ComputesInBfloat16": {_EXACT: "wider gradient hid it", _SGD: "wider gradient hid it"},
}  # fmt: skip


@pytest.mark.parametrize("name", CAUGHT)
def test_each_saboteur_is_caught_and_told_why(name: str, cases: dict[str, Case], judge) -> None:
    for case, words in CAUGHT[name].items():
        verdict = judge(SABOTEURS[name](), cases[case])
        assert verdict.status is Status.FAIL, f"{case} passed a backend that {SABOTEURS[name].__doc__}"
        assert re.search(words, verdict.message), f"{case}: {verdict.message}"
        assert re.search(r"step \d+", verdict.message), verdict.message


def test_every_saboteur_has_its_cases() -> None:
    assert set(CAUGHT) == set(SABOTEURS) - {"ClaimsNothing"}


def test_the_oracle_passes_what_the_saboteurs_fail(cases: dict[str, Case], judge) -> None:
    honest: Backend = OracleBackend()
    for name in sorted({case for caught in CAUGHT.values() for case in caught}):
        assert judge(honest, cases[name]).status is Status.PASS


def test_a_mismatch_names_both_scales_and_the_headroom(cases: dict[str, Case], judge) -> None:
    message = judge(SABOTEURS["NeverSkips"](), cases[_SGD]).message
    assert re.search(r"scale 1\.04858e\+06 -> \S+ \(expected 1\.04858e\+06 -> 524288\), headroom -\d\.\d\d bits", message), message
