"""Backends that break in their own ways: they die, hang, raise, or don't load. For the runner's tests."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from polyamp.backend import Execution, ScaleDriver
from polyamp.errors import UnsupportedError
from polyamp.loss_scale import LossScale
from polyamp_conformance.oracle.backend import OracleBackend, SpecDriver

_FATAL = 1024.0  # initial scale of the `static` script


class Dies(OracleBackend):
    """Takes its whole process down in one case."""

    name = "dies"

    def scale_driver(self, loss_scale: LossScale, device: str, execution: Execution) -> ScaleDriver:
        if loss_scale.init_scale == _FATAL:
            print("about to fall over", flush=True)
            os._exit(7)
        return SpecDriver(loss_scale)


class Hangs(OracleBackend):
    """Never returns from one case."""

    name = "hangs"

    def scale_driver(self, loss_scale: LossScale, device: str, execution: Execution) -> ScaleDriver:
        if loss_scale.init_scale == _FATAL:
            time.sleep(600)
        return SpecDriver(loss_scale)


class Raises(OracleBackend):
    """Raises in one case and goes on with the next."""

    name = "raises"

    def scale_driver(self, loss_scale: LossScale, device: str, execution: Execution) -> ScaleDriver:
        if loss_scale.init_scale == _FATAL:
            raise ZeroDivisionError("no such thing")
        if loss_scale.kind == "none":
            raise UnsupportedError("this backend always scales")
        return SpecDriver(loss_scale)


class DoesNotLoad(OracleBackend):
    """Fails before anything runs."""

    name = "does-not-load"

    def versions(self) -> Mapping[str, str]:
        raise RuntimeError("driver too old")
