"""torch.compile for the conformance suite: which backend works here, with the roundings of eager torch.

Rules (docs/spec.md, section 9.5)
- On the CPU inductor removes casts to 16 bit and back, so that overflows vanish; `emulate_precision_casts` brings them back.
- Without a compiler for inductor the graph is captured all the same and run by `aot_eager`; headers say which one it was.
- The graph is always whole: a graph break is an error.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

__all__ = ["compile_backend", "compile_whole"]

F = TypeVar("F", bound=Callable[..., Any])


@cache
def compile_backend(device: str) -> str:
    """`"inductor"` where a compiler for the device is found, else `"aot_eager"`."""
    usual = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    has_compiler = shutil.which(os.environ.get("CXX") or usual) is not None
    needs_triton = torch.device(device).type != "cpu"
    return "inductor" if has_compiler and not (needs_triton and find_spec("triton") is None) else "aot_eager"


def compile_whole(function: F, device: str, *, emulate_precision_casts: bool = True) -> F:
    """Compiles a function into one graph.

    Args:
        function: pure function of tensors.
        device: where it runs.
        emulate_precision_casts: whether 16-bit results are rounded between fused operations, as eager torch does.
    """
    backend = compile_backend(device)
    options: dict[str, Any] = {"emulate_precision_casts": emulate_precision_casts} if backend == "inductor" else {}
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend, options=options or None)  # type: ignore[return-value]
