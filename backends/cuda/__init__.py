"""The optional CUDA backend on numba-cuda."""

from __future__ import annotations

import importlib.util

from edgellm.errors import BackendUnavailable

# numba has an older CUDA target of its own, which must not take numba-cuda's place in silence.
if importlib.util.find_spec("numba_cuda") is None:
    raise BackendUnavailable("the cuda backend needs the package numba-cuda: pip install 'edgellm[cuda]'")
