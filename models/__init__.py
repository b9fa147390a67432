"""Model architectures, one file each. Installed as `edgellm.models` (see `package-dir` in pyproject.toml)."""

if not __name__.startswith("edgellm."):
    raise ImportError("import edgellm.models instead: pyproject.toml maps this folder (pip install -e .)")
