"""The progress of a command whose output is not a terminal, such as a log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import Progress, TaskID

__all__ = ["Stages", "narrated"]

_PARTS = 4
_PACKAGE = logging.getLogger("tree_compile")


class _Narrator(logging.Handler):
    """Makes each log message the description of a stage."""

    def __init__(self, progress: Progress, name: str) -> None:
        super().__init__()
        self._progress, self._name = progress, name
        self._task = progress.add_task(name, total=None)

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.update(self._task, description=f"{self._name}: {record.getMessage()}")


@contextmanager
def narrated(progress: Progress, name: str) -> Iterator[None]:
    """Shows on `progress` what the package logs meanwhile: what a model's first call is doing."""
    narrator, level = _Narrator(progress, name), _PACKAGE.level
    _PACKAGE.addHandler(narrator)
    _PACKAGE.setLevel(logging.INFO)
    try:
        yield
    finally:
        _PACKAGE.removeHandler(narrator)
        _PACKAGE.setLevel(level)


class Stages(Progress):
    """Prints a line when a stage begins and at every quarter of it, where bars would be drawn."""

    def __init__(self, **options: Any) -> None:
        super().__init__(disable=True, **options)
        self._began = time.perf_counter()

    def add_task(self, description: str, *args: Any, **options: Any) -> TaskID:
        """As `Progress.add_task`; prints the description."""
        task = super().add_task(description, *args, **options)
        self._say(description, "")
        return task

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """As `Progress.advance`; prints a line at every quarter."""
        task = self.tasks[task_id]
        before = task.percentage
        super().advance(task_id, advance)
        part = int(task.percentage * _PARTS / 100)
        if part > int(before * _PARTS / 100):
            self._say(task.description, f"{100 * part // _PARTS}%")

    def update(self, task_id: TaskID, *, description: str | None = None, **options: Any) -> None:
        """As `Progress.update`; prints a new description."""
        super().update(task_id, description=description, **options)
        if description is not None:
            self._say(description, "")

    def _say(self, description: str, done: str) -> None:
        seconds = time.perf_counter() - self._began
        line = f"{seconds:6.1f} s  {description}  {done}".rstrip()
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
