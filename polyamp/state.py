"""State mapping: one JSON-able dictionary of a loss scale and its counters, the same on every backend.

Rules (docs/spec.md, section 7)
- `version` 1 holds every field of `LossScaleState` and of `LossScale`, flat; what is saved on one backend resumes on any other.
- Loading validates first and never steps. A mapping that can't be loaded is a `StateError` and changes nothing.
- torch's five keys, Megatron's and DeepSpeed's layouts are read; their missing fields come from the configuration that is being loaded into.
- An empty mapping loads the defaults with a warning: torch writes one for a disabled scaler.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from polyamp.errors import LossScaleError, StateError
from polyamp.loss_scale import LossScale, LossScaleState

__all__ = ["VERSION", "load_state_dict", "state_dict"]

VERSION = 1
_STATE = tuple(f.name for f in fields(LossScaleState))
_CONFIG = tuple(f.name for f in fields(LossScale))
_TOLERATED = {"_growth_tracker"}  # torch's name for good_steps, written beside it so that torch.amp loads our mapping


def state_dict(config: LossScale, state: LossScaleState) -> dict[str, Any]:
    """Mapping of version 1. `load_state_dict` of it returns an equal pair."""
    values = {name: getattr(state, name) for name in _STATE}
    return {"version": VERSION, **values, **{name: getattr(config, name) for name in _CONFIG}}


def load_state_dict(mapping: Mapping[str, Any], config: LossScale) -> tuple[LossScale, LossScaleState]:
    """Reads a state mapping of polyamp, torch, Megatron or DeepSpeed.

    Args:
        mapping: what `state_dict` gave, perhaps through JSON, or another library's layout.
        config: configuration in force; it supplies what the mapping lacks.

    Returns:
        The configuration and the state to continue with.

    Raises:
        StateError: unknown version or layout, missing or unknown keys, or a value out of range.
    """
    if not isinstance(mapping, Mapping):
        raise StateError(f"expected a mapping, got {type(mapping).__name__}; pass what state_dict() returned")
    if not mapping:
        warnings.warn("empty loss-scale state: starting from the configured defaults", UserWarning, stacklevel=3)
        return config, config.init()
    if "version" in mapping:
        return _load_own(mapping)
    for keys, reader in _LAYOUTS.items():
        if set(keys) <= set(mapping):
            try:
                return _checked(*reader(mapping, config))
            except (TypeError, ValueError, ArithmeticError) as error:
                raise StateError(f"can't load a state with keys {', '.join(keys)}: {error}") from error
    raise StateError(
        f"unknown layout with keys {', '.join(map(str, mapping))}; expected polyamp's (with 'version'), torch's, Megatron's or DeepSpeed's"
    )


def _load_own(mapping: Mapping[str, Any]) -> tuple[LossScale, LossScaleState]:
    if mapping["version"] != VERSION or isinstance(mapping["version"], bool):
        raise StateError(f"state has version {mapping['version']!r}, this polyamp reads {VERSION}; upgrade polyamp or convert the checkpoint")
    keys = set(mapping) - {"version"} - _TOLERATED
    missing, unknown = {*_STATE, *_CONFIG} - keys, keys - {*_STATE, *_CONFIG}
    if missing or unknown:
        raise StateError(f"state lacks {', '.join(sorted(missing)) or 'nothing'} and has unknown {', '.join(sorted(map(str, unknown))) or 'nothing'}")
    try:
        config = LossScale(**{name: mapping[name] for name in _CONFIG})
        return _checked(config, LossScaleState(**{name: mapping[name] for name in _STATE}))
    except LossScaleError as error:
        raise StateError(f"can't load the state: {error}") from error


def _checked(config: LossScale, state: LossScaleState) -> tuple[LossScale, LossScaleState]:
    scale = config.check_scale(state.scale)
    for name in _STATE[1:]:
        value = getattr(state, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise LossScaleError(f"{name}={value!r}: expected an integer in [0, 2^31)")
    if not 1 <= state.hysteresis_left <= config.hysteresis:
        raise LossScaleError(f"hysteresis_left={state.hysteresis_left}: expected 1 to hysteresis={config.hysteresis}")
    if not state.consecutive_skips <= state.skipped <= state.steps:
        raise LossScaleError(
            f"consecutive_skips={state.consecutive_skips}, skipped={state.skipped}, steps={state.steps}: expected them in ascending order"
        )
    return config, replace(state, scale=scale)


def _from_torch(m: Mapping[str, Any], config: LossScale) -> tuple[LossScale, LossScaleState]:
    config = replace(
        config,
        growth_factor=float(m["growth_factor"]),
        backoff_factor=float(m["backoff_factor"]),
        growth_interval=int(m["growth_interval"]),
    )
    return config, LossScaleState(scale=float(m["scale"]), good_steps=int(m["_growth_tracker"]), hysteresis_left=config.hysteresis)


def _from_megatron(m: Mapping[str, Any], config: LossScale) -> tuple[LossScale, LossScaleState]:
    # The tracker falls below zero while skips go on; from 1 downwards the next overflow backs off at once.
    left = min(max(int(m["hysteresis_tracker"]), 1), config.hysteresis)
    return config, LossScaleState(scale=float(m["scale"]), good_steps=int(m["growth_tracker"]), hysteresis_left=left)


def _from_deepspeed(m: Mapping[str, Any], config: LossScale) -> tuple[LossScale, LossScaleState]:
    config = replace(
        config, growth_factor=float(m["scale_factor"]), backoff_factor=1 / float(m["scale_factor"]), growth_interval=int(m["scale_window"])
    )
    steps, since = int(m["cur_iter"]), int(m["cur_iter"]) - int(m["last_overflow_iter"]) - 1
    if since < 0:
        raise LossScaleError(f"last_overflow_iter={m['last_overflow_iter']!r}: expected less than cur_iter={steps}")
    left = min(max(int(m.get("cur_hysteresis", config.hysteresis)), 1), config.hysteresis)
    return config, LossScaleState(scale=float(m["cur_scale"]), good_steps=since % config.growth_interval, hysteresis_left=left, steps=steps)


_LAYOUTS = {
    ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"): _from_torch,
    ("scale", "growth_tracker", "hysteresis_tracker"): _from_megatron,
    ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window"): _from_deepspeed,
}
