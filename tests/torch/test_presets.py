"""The torch preset beside torch.amp itself: the same scales on the same events, step by step."""

from __future__ import annotations

import math
import random

import torch

from polyamp import LossScale


def test_torch_preset_follows_torch_amp() -> None:
    config = LossScale.like("torch", init_scale=1024.0, growth_interval=4)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    p = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([p], lr=0.0)
    state, rng = config.init(), random.Random(5)
    for step in range(400):
        finite = rng.random() > 0.15
        theirs.scale(torch.ones(1))
        p.grad = torch.tensor([1.0 if finite else math.inf])
        theirs.step(optimizer)
        theirs.update()
        state = config.update(state, finite)
        assert theirs.get_scale() == state.scale, step
        assert theirs.state_dict()["_growth_tracker"] == state.good_steps, step


def test_presets_default_as_torch_does() -> None:
    theirs, config = torch.amp.GradScaler("cpu").state_dict(), LossScale.like("torch")
    for name in ("growth_factor", "backoff_factor", "growth_interval"):
        assert theirs[name] == getattr(config, name)
    assert theirs["scale"] == config.init_scale
