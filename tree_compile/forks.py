"""Processes that are forked while other threads work, as those of a DataLoader are."""

from __future__ import annotations

import os
import threading

__all__ = ["free_in_forks"]


def free_in_forks(lock: threading.RLock) -> None:
    """No process is forked while another thread holds `lock`.

    Threads do not live on in a fork. What one of them had locked would stay so for ever, also the locks of modules that
    it was importing.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
