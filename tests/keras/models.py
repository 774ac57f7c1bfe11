"""Small models, data and readings that several test files share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from polyamp import LossScale, LossScaleState
from polyamp_keras import LossScaleOptimizer

FINITE, OVERFLOW = True, False


def data(rows: int = 64, features: int = 4) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((rows, features)).astype("float32")
    return x, x[:, :1]


def small_model(policy: str = "mixed_float16", features: int = 4) -> keras.Model:
    return keras.Sequential(
        [keras.Input((features,)), keras.layers.Dense(8, activation="relu", dtype=policy), keras.layers.Dense(1, dtype="float32")]
    )


def variables(*values: Sequence[float]) -> list[keras.Variable]:
    return [keras.Variable(np.asarray(value, "float32"), name=f"w{index}") for index, value in enumerate(values)]


def tensors(*values: Any, dtype: str = "float32") -> list[Any]:
    return [None if value is None else keras.ops.convert_to_tensor(np.asarray(value, "float32").astype(dtype)) for value in values]


def read(items: Iterable[Any]) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(item.value)) for item in items]


def same(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> bool:
    return len(before) == len(after) and all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def state_of(optimizer: LossScaleOptimizer) -> LossScaleState:
    mapping = optimizer.state_dict()
    return LossScaleState(**{name: mapping[name] for name in LossScaleState.__dataclass_fields__})


def replay(config: LossScale, events: Iterable[bool]) -> list[LossScaleState]:
    """States of the reference, the first before any event."""
    states = [config.init()]
    for finite in events:
        states.append(config.update(states[-1], finite))
    return states
