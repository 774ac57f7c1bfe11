"""Runs of the transition over a text of events: `.` is a finite step, `X` a non-finite one."""

from __future__ import annotations

from polyamp import LossScale, LossScaleState

EVENTS = "..X...XX..."


def run(config: LossScale, events: str, state: LossScaleState | None = None) -> list[LossScaleState]:
    """States after each event."""
    states, state = [], state or config.init()
    for event in events:
        state = config.update(state, event == ".")
        states.append(state)
    return states


def scales(config: LossScale, events: str, state: LossScaleState | None = None) -> list[float]:
    """Scales after each event."""
    return [s.scale for s in run(config, events, state)]
