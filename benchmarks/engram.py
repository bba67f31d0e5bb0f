"""`python benchmarks/engram.py`: engram rows of a prompt, warm and cold; the same as `spyglass bench engram`."""

import sys

from spyglass.bench.engram import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
