"""Conformance runner: the JAX side of `polyamp.backend.Backend`, built on the public `MixedPrecision` and `LossScaleState`."""

from polyamp_jax.runner.backend import JaxBackend

__all__ = ["JaxBackend"]
