"""Policy: which dtype each role of a training step has.

Rules (docs/spec.md, section 2)
- Roles: `param` (the authoritative copy), `compute` (forward and backward), `output` (what the model returns), `reduce`
  (gradient and loss reductions, across devices too).
- `Policy(str(p)) == p`, always. Canonical text: `params=float32,compute=float16,output=float32,reduce=float32`.
- Only floating leaves are ever cast: integers, bools, PRNG keys, complex numbers and token ids stay as they are.
- No alias depends on the device, and an unknown word is an error that lists the valid ones.
- Defaults of a partial text: params float32, compute like params, output like compute, reduce float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from polyamp.errors import PolicyError
from polyamp.formats import Format
from polyamp.op_rules import OP_RULES, OpClass

__all__ = ["ALIASES", "Policy"]

_CLASSES = tuple(c.value for c in OpClass)
_ROLE_FORMATS = ("float32", "float16", "bfloat16")
_KEYS = {
    **dict.fromkeys(("p", "params", "param", "param_dtype"), "param_dtype"),
    **dict.fromkeys(("c", "compute", "compute_dtype"), "compute_dtype"),
    **dict.fromkeys(("o", "output", "output_dtype"), "output_dtype"),
    **dict.fromkeys(("r", "reduce", "reduce_dtype"), "reduce_dtype"),
    "ops": "ops",
    "islands": "islands",
}
_PATTERN = re.compile(r"[\w.*?/\[\]!-]+")


def _mixed(compute: str) -> dict[str, str]:
    return {"param_dtype": "float32", "compute_dtype": compute, "output_dtype": "float32"}


def _all(dtype: str) -> dict[str, str]:
    return {"param_dtype": dtype, "compute_dtype": dtype, "output_dtype": dtype}


ALIASES: dict[str, dict[str, str]] = {
    **dict.fromkeys(("mixed_float16", "16-mixed", "fp16", "amp_fp16"), _mixed("float16")),
    **dict.fromkeys(("mixed_bfloat16", "bf16-mixed", "bf16", "amp_bf16"), _mixed("bfloat16")),
    **dict.fromkeys(("float32", "32-true", "fp32", "f32", "no"), _all("float32")),
    **dict.fromkeys(("float16", "16-true", "f16"), _all("float16")),
    **dict.fromkeys(("bfloat16", "bf16-true"), _all("bfloat16")),
}
"""Words that people type already: Keras, Lightning, Accelerate and Composer spellings."""


@dataclass(frozen=True, init=False)
class Policy:
    """Dtypes by role, op rules and float32 islands. Immutable, hashable, and equal to what its text parses to.

    Args:
        param_dtype: dtype of the parameters; or a whole policy text or alias, when it is the only argument.
        compute_dtype: dtype of forward and backward computation; defaults to `param_dtype`.
        output_dtype: dtype of what the model returns; defaults to `compute_dtype`.
        reduce_dtype: dtype of reductions over devices; defaults to float32.
        ops: op name -> class (`"compute"`, `"float32"`, `"promote"`, `"pass"`), overriding the table for that op; a class name of the
            table as a key overrides every op of that class.
        islands: shell patterns of module names or scopes that stay in float32.

    Raises:
        PolicyError: a word, dtype, op or class that the spec does not have. The message lists the valid ones.

    Example:
        >>> Policy("mixed_float16")
        Policy('params=float32,compute=float16,output=float32,reduce=float32')
        >>> Policy("p=f32,c=bf16").output_dtype
        'bfloat16'
    """

    param_dtype: str
    compute_dtype: str
    output_dtype: str
    reduce_dtype: str
    ops: tuple[tuple[str, OpClass], ...]
    islands: tuple[str, ...]

    def __init__(
        self,
        param_dtype: object = "float32",
        compute_dtype: object = None,
        output_dtype: object = None,
        reduce_dtype: object = None,
        *,
        ops: Mapping[str, str | OpClass] | Iterable[tuple[str, str | OpClass]] = (),
        islands: Iterable[str] = (),
    ) -> None:
        given: dict[str, Any] = {"param_dtype": param_dtype}
        alone = compute_dtype is None and output_dtype is None and reduce_dtype is None
        if isinstance(param_dtype, Policy):
            base = param_dtype
            given = {role: getattr(base, role) for role in _ROLES} | {"ops": dict(base.ops), "islands": base.islands}
        elif isinstance(param_dtype, str) and (alone or "=" in param_dtype):
            given = _parse(param_dtype)
        roles = {"compute_dtype": compute_dtype, "output_dtype": output_dtype, "reduce_dtype": reduce_dtype}
        given |= {role: value for role, value in roles.items() if value is not None}
        param = _role("param_dtype", given["param_dtype"])
        compute = _role("compute_dtype", given.get("compute_dtype", param))
        output = _role("output_dtype", given.get("output_dtype", compute))
        reduce = _role("reduce_dtype", given.get("reduce_dtype", "float32"))
        rules = _rules({**given.get("ops", {}), **dict(ops)})
        names = _islands([*given.get("islands", ()), *([islands] if isinstance(islands, str) else islands)])
        for name, value in zip((*_ROLES, "ops", "islands"), (param, compute, output, reduce, rules, names), strict=True):
            object.__setattr__(self, name, value)

    @property
    def is_mixed(self) -> bool:
        """Whether computation runs in another dtype than the parameters have."""
        return self.compute_dtype != self.param_dtype

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients can leave the format's range, so that scaling pays: float16 computation."""
        return self.compute_dtype == "float16"

    def op_class(self, op: str) -> OpClass:
        """Class in which this policy runs `op`: an override of the op, then of its class, then the table, then PASS."""
        overrides = dict(self.ops)
        base = OP_RULES.get(op, OpClass.PASS)
        return overrides.get(op) or overrides.get(base.value) or base

    def is_island(self, name: str) -> bool:
        """Whether the module or scope `name` (`"encoder.norm1"`, `"block/head"`) stays in float32."""
        return any(fnmatchcase(name, pattern) for pattern in self.islands)

    def __str__(self) -> str:
        text = f"params={self.param_dtype},compute={self.compute_dtype},output={self.output_dtype},reduce={self.reduce_dtype}"
        if self.ops:
            text += ",ops=" + ";".join(f"{op}:{cls.value}" for op, cls in self.ops)
        if self.islands:
            text += ",islands=" + ";".join(self.islands)
        return text

    def __repr__(self) -> str:
        return f"Policy({str(self)!r})"


_ROLES = ("param_dtype", "compute_dtype", "output_dtype", "reduce_dtype")


def _role(role: str, dtype: object) -> str:
    name = Format.of(dtype).name
    if name not in _ROLE_FORMATS:
        raise PolicyError(f"{role}={name}: a policy role takes {', '.join(_ROLE_FORMATS)}; float8 is scaled per tensor, not by a policy")
    return name


def _rules(ops: Mapping[str, str | OpClass]) -> tuple[tuple[str, OpClass], ...]:
    rules: dict[str, OpClass] = {}
    for op, value in ops.items():
        if op not in OP_RULES and op not in _CLASSES:
            raise PolicyError(f"unknown op {op!r} in ops=; the table has {', '.join(sorted(OP_RULES))}, or a whole class: {', '.join(_CLASSES)}")
        try:
            rules[op] = OpClass(str(value))
        except ValueError:
            raise PolicyError(f"unknown op class {value!r} for {op!r}; expected one of {', '.join(_CLASSES)}") from None
    return tuple(sorted(rules.items()))


def _islands(names: Iterable[str]) -> tuple[str, ...]:
    unique = sorted(set(names))
    for name in unique:
        if not _PATTERN.fullmatch(name):
            raise PolicyError(f"island {name!r} is not a module or scope pattern: letters, digits and . / _ - * ? [ ] ! are allowed")
    return tuple(unique)


def _parse(text: str) -> dict[str, Any]:
    word = text.strip()
    if "=" not in word:
        if word in ALIASES:
            return dict(ALIASES[word])
        hint = "; 'half' depends on the device in jmp: write float16 or bfloat16" if word == "half" else ""
        raise PolicyError(f"unknown policy {text!r}; expected one of {', '.join(sorted(ALIASES))}, or key=dtype pairs such as p=f32,c=f16{hint}")
    given: dict[str, Any] = {}
    for part in word.split(","):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        role = _KEYS.get(key)
        if role is None or not separator or not value:
            raise PolicyError(f"can't read {part!r} in policy {text!r}; expected key=value with a key of {', '.join(sorted(_KEYS))}")
        if role in given:
            raise PolicyError(f"policy {text!r} names {role} twice")
        if role == "ops":
            pairs = [piece.partition(":") for piece in value.split(";")]
            given[role] = {op.strip(): cls.strip() for op, _, cls in pairs}
        elif role == "islands":
            given[role] = [piece.strip() for piece in value.split(";")]
        else:
            given[role] = value
    given.setdefault("param_dtype", "float32")
    return given
