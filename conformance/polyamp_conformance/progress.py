"""Progress of a run: live bars on a terminal, one line per finished backend elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["LiveProgress"]


class LiveProgress:
    """Callable for `runner.run`; a context manager that owns the display."""

    def __init__(self, console: Console) -> None:
        self._console, self._live = console, console.is_terminal
        columns = (
            TextColumn("{task.fields[backend]:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[doing]}"),
        )
        self._progress = Progress(*columns, console=console, disable=not self._live)
        self._tasks: dict[str, TaskID] = {}
        self._said: set[str] = set()

    def __call__(self, backend: str, done: int, planned: int, doing: str) -> None:
        if not self._live:
            if doing == "done" and backend not in self._said:
                self._said.add(backend)
                self._console.print(f"{backend}: {done} of {planned} cases observed")
            return
        if backend not in self._tasks:
            self._tasks[backend] = self._progress.add_task("", total=None, backend=backend, doing=doing)
        self._progress.update(self._tasks[backend], completed=done, total=planned or None, doing=doing)

    def __enter__(self) -> LiveProgress:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._progress.stop()
