"""The progress of a command whose output is not a terminal, such as a log."""

from __future__ import annotations

import time
from typing import Any

from rich.progress import Progress, TaskID

__all__ = ["Stages"]

_PARTS = 4


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

    def _say(self, description: str, done: str) -> None:
        seconds = time.perf_counter() - self._began
        line = f"{seconds:6.1f} s  {description}  {done}".rstrip()
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
