"""`python benchmarks/stream.py`: the server's work per streamed token; the same as `spyglass bench stream`."""

import sys

from spyglass.bench.stream import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
