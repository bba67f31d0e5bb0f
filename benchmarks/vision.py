"""`python benchmarks/vision.py`: the picture tower on a GPU; the same as `spyglass bench vision`."""

import sys

from spyglass.bench.vision import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
