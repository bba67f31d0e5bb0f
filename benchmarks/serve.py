"""`python benchmarks/serve.py`: a server under load; the same as `spyglass bench serve`."""

import sys

from spyglass.bench.serve import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
