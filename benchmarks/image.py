"""`python benchmarks/image.py`: the image path against the plain pipeline; the same as `spyglass bench image`."""

import sys

from spyglass.bench.image import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
