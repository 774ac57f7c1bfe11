"""XLA flags: the switches under which XLA on a CPU rounds where the program says so.

Rules (docs/spec.md, section 9.5)
- A flag is set only for the jaxlib versions that were seen to know it: an unknown flag aborts the process at the first use of XLA.
- What the user has set already wins: a flag that is named in `XLA_FLAGS` is never named again.
- Reading the version imports no framework, so that the flags can be set before one loads.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["HONEST_FLAGS", "XlaFlag", "honest_flags", "jaxlib_version", "merge_flags", "xla_environment"]


@dataclass(frozen=True, slots=True)
class XlaFlag:
    """One flag and where it is known.

    Attributes:
        name: flag name, without dashes.
        value: value to set; the empty string is a value.
        since: first (major, minor, micro) of jaxlib in which the flag was found.
        until: first (major, minor) for which nobody looked, or None for a flag that has been in every release since `since`
            and is documented or used by jax itself, so that its sudden removal is not to be expected.
        machine: pattern of `platform.machine()` on which it makes sense.
        why: what it keeps honest.
    """

    name: str
    value: str
    since: tuple[int, int, int]
    until: tuple[int, int] | None
    machine: str
    why: str

    def __str__(self) -> str:
        return f"--{self.name}={self.value}"


HONEST_FLAGS: tuple[XlaFlag, ...] = (
    XlaFlag(
        "xla_cpu_max_isa",
        "AVX2",
        (0, 6, 0),
        None,
        r"x86_64|amd64",
        "with AVX512-FP16 a float16 a * b + c becomes one fused operation, which rounds once instead of twice",
    ),
    XlaFlag(
        "xla_allow_excess_precision",
        "false",
        (0, 6, 0),
        None,
        r".*",
        "the default drops conversions to a 16-bit format and back, and with them overflow",
    ),
    XlaFlag("xla_disable_hlo_passes", "algsimp", (0, 6, 0), None, r".*", "the algebraic simplifier cancels a constant scale against its inverse"),
    XlaFlag(
        "xla_cpu_experimental_ynn_fusion_type",
        "",
        (0, 8, 2),
        (0, 11),
        r".*",
        "fused reductions and matmuls of this library are miscompiled or lose NaN in some 0.10 releases",
    ),
)
"""Verified in jaxlib 0.6.0, 0.7.2, 0.8.2, 0.9.2 and 0.10.2."""


def jaxlib_version() -> str | None:
    """Version of the installed jaxlib from its metadata, or None; imports nothing of it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jaxlib")
    except PackageNotFoundError:
        return None


def honest_flags(version: str | None, machine: str | None = None) -> tuple[XlaFlag, ...]:
    """Flags that this jaxlib version is known to know.

    Args:
        version: jaxlib version such as `"0.10.2"`; None, or a text without three leading numbers, gives no flags.
        machine: processor name; by default this host's.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    if match is None:
        return ()
    installed = (int(match[1]), int(match[2]), int(match[3]))
    host = (platform.machine() if machine is None else machine).lower()
    return tuple(
        flag
        for flag in HONEST_FLAGS
        if installed >= flag.since and (flag.until is None or installed[:2] < flag.until) and re.fullmatch(flag.machine, host)
    )


def merge_flags(current: str, flags: tuple[XlaFlag, ...]) -> str:
    """Appends the flags that `current`, a value of `XLA_FLAGS`, does not name already. Merging twice changes nothing."""
    named = {word.lstrip("-").partition("=")[0] for word in current.split()}
    return " ".join([current.strip(), *(str(flag) for flag in flags if flag.name not in named)]).strip()


def xla_environment(current: Mapping[str, str], version: str | None = None, machine: str | None = None) -> dict[str, str]:
    """Environment for a process that runs JAX: `XLA_FLAGS`, or nothing where there is nothing to add.

    Args:
        current: environment that the process would have, such as `os.environ`.
        version: jaxlib version; by default the installed one's.
        machine: processor name; by default this host's.
    """
    before = current.get("XLA_FLAGS", "")
    after = merge_flags(before, honest_flags(version or jaxlib_version(), machine))
    return {} if after == before.strip() else {"XLA_FLAGS": after}
