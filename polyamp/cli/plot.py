"""Plot of traces: scale over steps on a log2 axis, and below it one row of skip ticks a trace.

Rules
- matplotlib is optional: without it the error has the command that installs it.
- The figure is made without pyplot, so no display, backend or global state is touched.
- The same traces give the same bytes: no date, and fixed element ids in SVG.
- A scale that is not finite or not positive leaves a gap: it has no place on a log axis.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Literal

from polyamp.cli.failure import Failure
from polyamp.trace import Trace

__all__ = ["draw"]

_WIDTH, _HEIGHT, _ROW = 9.0, 4.0, 0.28  # inches; a row of ticks is added per trace
_THIN, _THICK = 1.2, 8.0  # points: the last line, and what may be added to the first one
_DPI = 144


def draw(traces: Sequence[tuple[str, Trace]], kind: Literal["png", "svg"] | str, title: str) -> bytes:
    """Draws traces over one another.

    Args:
        traces: label and trace, in the order of the legend.
        kind: `"png"` or `"svg"`.
        title: title of the picture.

    Returns:
        The picture file's bytes.

    Raises:
        Failure: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise Failure("drawing needs matplotlib, which is not installed; run: pip install 'polyamp[plot]'") from error
    rows = _ROW * len(traces) + 0.2
    with rc_context({"svg.hashsalt": "polyamp", "svg.fonttype": "none"}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT + rows), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[_HEIGHT, rows])
        above.set_title(title, parse_math=False)
        above.set_yscale("log", base=2)
        above.set_ylabel("loss scale")
        above.grid(alpha=0.3)
        lines = []
        for index, (_, trace) in enumerate(traces):
            steps = [record.step for record in trace.records]
            scales = [record.scale for record in trace.records]
            if trace.records:  # a step lasts until the next one: the last needs an end
                steps.append(steps[-1] + 1)
                scales.append(trace.records[-1].scale_after)
            heights = [scale if scale > 0 and math.isfinite(scale) else math.nan for scale in scales]
            # Earlier lines are wider, so that one which agrees with a later one stays visible round it.
            width = _THIN + min(2.0, _THICK / len(traces)) * (len(traces) - 1 - index)
            lines += above.plot(steps, heights, drawstyle="steps-post", linewidth=width)
            below.eventplot(list(trace.skips), lineoffsets=index, linelengths=0.8, linewidths=1.0, colors=[lines[-1].get_color()])
        labels = [label for label, _ in traces]
        for text in above.legend(lines, labels, fontsize="small").get_texts():
            text.set_parse_math(False)
        below.set_yticks(range(len(traces)), labels, fontsize="x-small", parse_math=False)
        below.set_ylim(len(traces) - 0.5, -0.5)
        below.set_xlabel("step (ticks: skipped)")
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()
