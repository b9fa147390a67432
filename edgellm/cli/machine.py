"""Facts about this machine and process that several commands report."""

from __future__ import annotations

import os
import sys

__all__ = ["default_threads", "peak_rss_bytes"]


def default_threads() -> int:
    """Physical cores that this process may use."""
    import psutil

    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed))


def peak_rss_bytes() -> int:
    """The most memory this process ever held, mapped file pages included."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
