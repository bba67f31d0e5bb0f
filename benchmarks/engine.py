"""`python benchmarks/engine.py`: many requests at once; the same as `spyglass bench engine`."""

import sys

from spyglass.bench.engine import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
