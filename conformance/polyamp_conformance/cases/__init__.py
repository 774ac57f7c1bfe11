"""Cases of the suite, in the order in which they run and appear in reports."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache

from polyamp_conformance.cases.base import Case
from polyamp_conformance.cases.scripted import scripted_cases
from polyamp_conformance.cases.stepping import stepping_cases
from polyamp_conformance.cases.training import training_cases

__all__ = ["Case", "all_cases", "select"]


@cache
def all_cases(seed: int = 0) -> tuple[Case, ...]:
    """Every case, for one base seed of the training workloads."""
    return (*scripted_cases(), *stepping_cases(), *training_cases(seed))


def select(cases: Iterable[Case], families: Iterable[str] = (), patterns: Iterable[str] = ()) -> list[Case]:
    """Cases of any of the families and matching any of the shell patterns; an empty filter lets everything through."""
    wanted, globs = set(families), list(patterns)
    return [
        case for case in cases if (not wanted or case.family in wanted) and (not globs or any(fnmatchcase(case.name, pattern) for pattern in globs))
    ]
