"""`python benchmarks/load.py [DIR]`: loading against `cat`; the same as `spyglass bench load`."""

import sys

from spyglass.bench.load import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
