"""autocast: a region in which torch runs by the op table of a polyamp policy, the same on every device.

Rules (docs/spec.md, section 2.3)
- torch.autocast does what it can: casting to the compute dtype, with its cache of cast weights. A torch function mode makes up the rest:
  on the CPU torch leaves softmax, exp, pow, sum, norms and many more in 16 bit.
- Only floating tensors of the region's device are cast, and never float64: torch.autocast leaves those alone as well.
- An explicit `dtype=` or `out=` argument and an in-place form are the caller's own choice: they run as they are.
- The innermost region decides. A float32 policy, or `enabled=False`, switches an outer region off.
- Backward runs outside of the region, in the dtypes that the forward pass chose.

Out of reach: ops that C++ code calls inside another op, ops called as `torch.ops.aten.*` or under `torch.jit.script`, and, in compiled code,
ops inside the Python functions of `polyamp_torch.op_names.COMPOSITES`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from polyamp import OP_RULES, OpClass, Policy, UnsupportedError
from polyamp_torch.op_names import COMPOSITES, NATIVE_COMPUTE, OPS

__all__ = ["autocast"]

Function = Callable[..., Any]
Treatments = Mapping[Function, tuple[OpClass, bool]]
"""Class in which a function has to run, and whether torch's own casting must be off meanwhile."""

_CALL_MATMUL = ("cdist",)  # in C++, where torch.autocast would cast its operands down
_CASTABLE = (torch.float16, torch.bfloat16, torch.float32)


class _Regions(threading.local):
    """Regions that this thread is in, innermost last; None where one switches casting off."""

    def __init__(self) -> None:
        self.stack: list[_OpRules | None] = []


_regions = _Regions()


def autocast(policy: Policy | str, device: str | torch.device = "cpu", *, enabled: bool = True) -> AbstractContextManager[None]:
    """Context manager and decorator that runs torch operations in the dtypes of a policy.

    Args:
        policy: `polyamp.Policy`, or a text or alias of one, such as `"mixed_float16"`. Its compute dtype and op rules are used;
            parameters keep their dtype and are cast where they are used.
        device: device whose operations are meant, `"cpu"`, `"cuda"` or a `torch.device`.
        enabled: False switches casting off, in an outer region too.

    Raises:
        polyamp.PolicyError: a policy that can't be read.
        polyamp.UnsupportedError: a policy with `islands`: a region does not know the names of modules.

    Example:
        >>> with autocast("mixed_float16"):
        ...     logits = torch.nn.Linear(4, 2)(torch.ones(1, 4))
        ...     probabilities = logits.softmax(-1)
        >>> logits.dtype, probabilities.dtype
        (torch.float16, torch.float32)
    """
    compute_dtype, treatments = _plan(str(policy))
    device_type = torch.device(device).type
    if enabled and compute_dtype is not torch.float32:
        return _region(device_type, compute_dtype, treatments)
    return _plain(device_type)


@contextmanager
def _region(device: str, compute_dtype: torch.dtype, treatments: Treatments) -> Iterator[None]:
    mode = _OpRules(device, compute_dtype, treatments)
    with torch.autocast(device, compute_dtype):
        # Where the device is missing, torch warns and switches its own casting off.
        _regions.stack.append(mode if torch.is_autocast_enabled(device) else None)
        try:
            with mode:
                yield
        finally:
            _regions.stack.pop()


@contextmanager
def _plain(device: str) -> Iterator[None]:
    _regions.stack.append(None)
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        _regions.stack.pop()


class _OpRules(TorchFunctionMode):
    """Casts the arguments of the functions that torch.autocast itself does not handle as the policy says."""

    def __init__(self, device: str, compute_dtype: torch.dtype, treatments: Treatments) -> None:
        super().__init__()
        self.device = device
        self.compute_dtype = compute_dtype
        self.treatments = treatments

    def __torch_function__(self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if _regions.stack[-1] is not self:
            return func(*args, **kwargs)
        treatment = self.treatments.get(func)
        if treatment is None:
            if func in _BODIES and not torch.compiler.is_compiling():
                with self:
                    return _BODIES[func](*args, **kwargs)
            return func(*args, **kwargs)
        op_class, switch_off = treatment
        if kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if op_class is OpClass.PROMOTE:
            dtype = self._widest(args, kwargs)
            if dtype is None:
                return func(*args, **kwargs)
        elif op_class is OpClass.PASS or _names_dtype(args, kwargs):
            dtype = None
        else:
            dtype = torch.float32 if op_class is OpClass.FLOAT32 else self.compute_dtype
        if dtype is not None:
            args = tuple(self._cast(value, dtype) for value in args)
            kwargs = {key: self._cast(value, dtype) for key, value in kwargs.items()}
        if not switch_off:
            return func(*args, **kwargs)
        with torch.autocast(self.device, enabled=False):
            return func(*args, **kwargs)

    def _is_mine(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype in _CASTABLE and value.device.type == self.device

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)) and not hasattr(value, "_make"):
            return type(value)([self._cast(item, dtype) for item in value])
        return value.to(dtype) if self._is_mine(value) else value

    def _widest(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype | None:
        """Widest dtype of the floating inputs; None when they all have it."""
        dtypes = {value.dtype for value in _flat((*args, *kwargs.values())) if self._is_mine(value)}
        if len(dtypes) < 2:
            return None
        return torch.float32  # float16 and bfloat16 hold neither of each other


def _flat(values: Any) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            flat.extend(_flat(value))
        else:
            flat.append(value)
    return flat


def _names_dtype(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the caller asks for the dtype of the result."""
    return kwargs.get("dtype") is not None or any(isinstance(value, torch.dtype) for value in args)


# A plain dict, because torch.compile traces through functools caches and warns about them.
_plans: dict[str, tuple[torch.dtype, Treatments]] = {}


def _plan(text: str) -> tuple[torch.dtype, Treatments]:
    """Compute dtype of a policy, and what to do with the functions that torch.autocast does not run as the policy says."""
    if text not in _plans:
        _plans[text] = _make_plan(text)
    return _plans[text]


def _make_plan(text: str) -> tuple[torch.dtype, Treatments]:
    policy = Policy(text)
    if policy.islands:
        raise UnsupportedError(
            f"policy islands {', '.join(policy.islands)}: autocast does not know the names of modules; "
            "run those modules in autocast('float32') and cast their inputs"
        )
    found: dict[Function, tuple[OpClass, bool]] = {}
    for function, op in OPS.items():
        op_class = policy.op_class(op)
        usual = OP_RULES[op] is op_class
        if not (usual and (op in NATIVE_COMPUTE or op_class is OpClass.PASS)):
            found[function] = (op_class, not usual or op_class is OpClass.COMPUTE or op in _CALL_MATMUL)
    return getattr(torch, policy.compute_dtype), found


def _body(function: Any) -> Callable[..., Any]:
    """A Python function of torch without its opening `has_torch_function` test, so that a mode can see the ops inside it."""

    def no(*_: Any) -> bool:
        return False

    tests = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    body = FunctionType(function.__code__, {**function.__globals__, **dict.fromkeys(tests, no)}, function.__name__, function.__defaults__)
    body.__kwdefaults__ = function.__kwdefaults__
    return body


_BODIES = {function: _body(function) for function in COMPOSITES}
