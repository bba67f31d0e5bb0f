"""`python benchmarks/ops.py`: each op beside its reference; the same as `spyglass bench ops`."""

import sys

from spyglass.bench.ops import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
