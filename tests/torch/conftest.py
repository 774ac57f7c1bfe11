"""Fixtures of the torch tests: one thread, and small training set-ups whose numbers are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import nn

from polyamp_torch import GradScaler

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def parameter() -> Callable[..., nn.Parameter]:
    """Makes a float32 parameter of the given values."""

    def make(*values: float) -> nn.Parameter:
        return nn.Parameter(torch.tensor(values))

    return make


Step = Callable[[GradScaler, torch.optim.Optimizer, nn.Parameter, Sequence[float]], None]


@pytest.fixture
def take_step() -> Step:
    """One whole step whose unscaled gradient is given."""

    def step(scaler: Any, optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradient: Sequence[float]) -> None:
        optimizer.zero_grad()
        scaler.scale((parameter * torch.tensor(gradient)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    return step
