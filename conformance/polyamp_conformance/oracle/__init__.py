"""The oracle: the spec's training step in numpy, with every rounding written out.

`rounding` rounds, `tape` differentiates, `ops` are the operations, `network` builds a task, `optimizers` update in float32,
`trainer` is the step as a transaction, `backend` offers it as a target like any other.
"""
