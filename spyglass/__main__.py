"""`python -m spyglass` is the `spyglass` command."""

from __future__ import annotations

import sys

from spyglass.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
