"""`python benchmarks/model.py`: decode and prefill of `mini`; the same as `spyglass bench model`."""

import sys

from spyglass.bench.model import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
