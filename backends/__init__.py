"""Backends: the op set that models are written in, and one package per kind of machine.

Installed as `edgellm.backends` (see `package-dir` in pyproject.toml).
"""

if not __name__.startswith("edgellm."):
    raise ImportError("import edgellm.backends instead: pyproject.toml maps this folder (pip install -e .)")
