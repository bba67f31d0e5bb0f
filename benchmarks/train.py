"""`python benchmarks/train.py`: fine-tuning at real layer sizes; the same as `spyglass bench train`."""

import sys

from spyglass.bench.train import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
