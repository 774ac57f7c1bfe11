"""Plots: scale trajectories as SVG text, one row a backend, on a log2 axis with a tick for every skipped step."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np

from polyamp.trace import Trace

__all__ = ["trajectories"]

_LINE, _SKIP, _PART = "#1f6f8b", "#c8553d", "#8a8a8a"


def trajectories(traces: Mapping[str, Trace], title: str, reference: str | None = None) -> str:
    """Draws scale against step.

    Args:
        traces: backend name -> trace, in the order of the rows.
        title: what is shown.
        reference: row that the others are held against: a dotted line marks where a row first parts from it.

    Returns:
        An `<svg>` element without XML prologue, for embedding.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = len(traces)
    figure = Figure(figsize=(10, 0.9 + 0.95 * rows), layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, 1, sharex=True, sharey=True))
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    for axis, (name, trace) in zip(axes, traces.items(), strict=True):
        steps = [r.step for r in trace.records]
        exponents = [float(np.log2(r.scale)) for r in trace.records]
        axis.step(steps, exponents, where="post", color=_LINE, linewidth=1.1)
        axis.plot(trace.skips, [0.06] * len(trace.skips), "|", color=_SKIP, markersize=7, transform=axis.get_xaxis_transform())
        parted = _parting(trace, traces[reference]) if reference is not None and reference in traces else None
        if parted is not None:
            axis.axvline(parted, color=_PART, linestyle=":", linewidth=1.2)
        axis.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
        axis.yaxis.set_major_formatter(lambda exponent, _: f"$2^{{{exponent:.0f}}}$")
        axis.tick_params(labelsize=8)
        axis.grid(axis="y", alpha=0.25)
        axis.margins(x=0.005, y=0.18)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("step (red ticks: skipped)", fontsize=9)
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _parting(trace: Trace, reference: Trace) -> int | None:
    pairs: Sequence[tuple[object, object]] = [
        ((a.scale, a.skipped), (b.scale, b.skipped)) for a, b in zip(trace.records, reference.records, strict=False)
    ]
    return next((step for step, (a, b) in enumerate(pairs) if a != b), None)
