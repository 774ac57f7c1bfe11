"""A polyamp backend of another distribution: loss scaling in plain Python, without arrays or a framework.

It claims the loss-scale family alone. The state machine is written anew from docs/spec.md, section 3.2, so that the conformance suite
has something to check.
"""
