"""`python -m edgellm`: the `edgellm` program."""

from __future__ import annotations

import sys

from edgellm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
