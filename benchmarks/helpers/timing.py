"""Several steps timed in turn, so that what else the machine does disturbs all of them alike."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable


def seconds_in_turn(
    steps: list[Callable[[], None]], rounds: int, clock: Callable[[], float] = time.process_time
) -> list[list[float]]:
    """Seconds of every step in each of `rounds` rounds; one round before them, to warm up, is left out."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(rounds + 1):
        for step, taken in zip(steps, times, strict=True):
            began = clock()
            step()
            taken.append(clock() - began)
    return [taken[1:] for taken in times]


def keep_freed_memory() -> None:
    """Tells glibc to take all memory from the heap, and to give none of it back; nothing elsewhere."""
    if sys.platform == "linux":
        mallopt, trim_threshold, mmap_max = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0), -1, -4
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, -1)
