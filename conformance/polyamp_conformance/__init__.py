"""polyamp_conformance: identical seeded workloads on every backend, judged against one numpy oracle.

- `workloads`, `data`: what is trained, as arrays. `oracle`: the reference, with explicit rounding and headroom.
- `cases`: what is asked of a backend, each citing its section of docs/spec.md. `judge`: the rules by which a trace is accepted.
- `worker`: one process a backend, which writes traces. `runner`: starts the workers and judges afterwards.
- `results`, `report`: JSON Lines, JUnit XML, terminal table and one self-contained HTML page.

It imports no backend: they are found through `polyamp.registry`.
"""
