"""Narrow exceptions. Each message says what was given, what was expected and what to do next.

Every class also derives from the built-in that a caller would reach for, so `except ValueError` keeps working.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "DuplicateBackendError",
    "LossScaleError",
    "LossScaleStalled",
    "MissingFrameworkError",
    "MisuseError",
    "PolicyError",
    "PolyampError",
    "StateError",
    "TraceError",
    "UnknownBackendError",
    "UnsupportedError",
]


class PolyampError(Exception):
    """Base of everything that polyamp raises on purpose."""


class PolicyError(PolyampError, ValueError):
    """A policy text, dtype name or op rule that is not in the spec."""


class LossScaleError(PolyampError, ValueError):
    """A loss-scale configuration or value out of the range that the spec allows."""


class StateError(PolyampError, ValueError):
    """A state mapping that can't be loaded; the state it was meant for is unchanged."""


class TraceError(PolyampError, ValueError):
    """A trace that is corrupt, or a trace file that would be overwritten."""


class MisuseError(PolyampError, RuntimeError):
    """Calls of one training step in an order that the spec forbids."""


class LossScaleStalled(PolyampError, RuntimeError):
    """Too many skipped steps in a row: no scale of the allowed range makes the gradients finite."""


class BackendError(PolyampError):
    """Base of the errors of finding and loading backends."""


class UnknownBackendError(BackendError, LookupError):
    """No installed distribution registers a backend of this name."""


class MissingFrameworkError(BackendError, ImportError):
    """The backend is registered, but the framework that it drives is not installed."""


class DuplicateBackendError(BackendError, RuntimeError):
    """Two distributions register one backend name."""


class UnsupportedError(BackendError, NotImplementedError):
    """The backend does not claim this device, format, model or execution."""
