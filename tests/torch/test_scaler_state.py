"""Saving, loading, pickling and copying; exchange with torch.amp."""

from __future__ import annotations

import copy
import json
import math
import pickle

import pytest
import torch

from polyamp import LossScale, MisuseError, StateError
from polyamp import state as portable
from polyamp_torch import GradScaler


def after(events, take_step, parameter, **options):
    scaler = GradScaler("cpu", **options)
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    for event in events:
        take_step(scaler, optimizer, p, [math.inf if event == "X" else 1.0])
    return scaler


def going_on(scaler, events, take_step, parameter):
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    scales = []
    for event in events:
        take_step(scaler, optimizer, p, [math.inf if event == "X" else 1.0])
        scales.append(scaler.get_scale())
    return scales


REST = "..X.X...X..."


def test_state_dict_is_the_portable_mapping(take_step, parameter):
    config = LossScale.dynamic(8.0, growth_interval=3, hysteresis=2)
    scaler = after("..X.", take_step, parameter, loss_scale=config)
    state = config.init()
    for finite in (True, True, False, True):
        state = config.update(state, finite)
    assert scaler.state_dict() == {**portable.state_dict(config, state), "_growth_tracker": state.good_steps}


@pytest.mark.parametrize("carrier", ["dict", "json", "pickle", "copy"])
def test_the_trajectory_goes_on_as_if_nothing_happened(carrier, take_step, parameter):
    config = LossScale.dynamic(8.0, growth_interval=3, hysteresis=2, hysteresis_refill="growth", max_scale=16.0)
    scaler = after("..X.", take_step, parameter, loss_scale=config)
    if carrier == "pickle":
        other = pickle.loads(pickle.dumps(scaler))
    elif carrier == "copy":
        other = copy.deepcopy(scaler)
    else:
        other = GradScaler("cpu")
        mapping = scaler.state_dict()
        other.load_state_dict(json.loads(json.dumps(mapping)) if carrier == "json" else mapping)
    assert other.loss_scale == config
    assert isinstance(other, torch.amp.GradScaler)
    assert going_on(other, REST, take_step, parameter) == going_on(scaler, REST, take_step, parameter)
    assert other.state_dict() == scaler.state_dict()


def test_torch_loads_our_state(take_step, parameter):
    scaler = after("..X.", take_step, parameter, init_scale=8.0, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert going_on(theirs, REST, take_step, parameter) == going_on(scaler, REST, take_step, parameter)


def test_we_load_torchs_state(take_step, parameter):
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3, growth_factor=4.0, backoff_factor=0.25)
    going_on(theirs, "..X.", take_step, parameter)
    scaler = GradScaler("cpu")
    scaler.load_state_dict(theirs.state_dict())
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 3)
    assert going_on(scaler, REST, take_step, parameter) == going_on(theirs, REST, take_step, parameter)


def test_an_empty_mapping_starts_over_with_a_warning(take_step, parameter):
    scaler = after("X", take_step, parameter, init_scale=8.0)
    with pytest.warns(UserWarning, match="empty loss-scale state"):
        scaler.load_state_dict({})
    assert scaler.get_scale() == 8.0


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"scale": 0.0}, {"scale": math.nan}, {"good_steps": -1}, {"growth_factor": 1.0}, {"surprise": 1}, {"steps": "3"}]
)
def test_a_bad_mapping_changes_nothing(change, take_step, parameter):
    scaler = after("..X.", take_step, parameter, init_scale=8.0)
    before = scaler.state_dict()
    with pytest.raises(StateError):
        scaler.load_state_dict({**before, **change})
    assert scaler.state_dict() == before
    assert scaler.last_step.step == 3


def test_loading_forgets_a_step_that_was_under_way(take_step, parameter):
    scaler = after(".", take_step, parameter, init_scale=8.0)
    saved = scaler.state_dict()
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.load_state_dict(saved)
    with pytest.raises(MisuseError, match="without a verdict"):
        scaler.update()
    assert scaler.state_dict() == saved


@pytest.mark.parametrize("do", [pickle.dumps, copy.deepcopy])
def test_no_pickle_inside_a_step(do, parameter):
    scaler = GradScaler("cpu")
    scaler.scale(parameter(1.0).sum())
    with pytest.raises(MisuseError, match="between two steps"):
        do(scaler)


def test_a_disabled_scaler_pickles():
    scaler = pickle.loads(pickle.dumps(GradScaler("cpu", enabled=False)))
    assert not scaler.is_enabled()
    assert scaler.get_scale() == 1.0
