"""The heap of a process that lives long: short garbage collections, and memory that goes back to the system."""

from __future__ import annotations

import ctypes
import gc

__all__ = ["settle"]


def settle() -> None:
    """Collect all garbage, give what is free back to the system, and leave what is left out of later collections.

    A full collection looks at every object, most of which a model's vocabulary and recorded steps keep for as long as
    it is loaded: 20 to 120 ms in which no answer goes on. After this it looks only at what came later. A model that was
    closed is a ring of references that only a collection frees, and malloc keeps what lay in it: 100 MB and more.
    """
    gc.unfreeze()
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
    gc.freeze()
