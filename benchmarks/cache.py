"""`python benchmarks/cache.py`: first token of a known prompt, beside a new one; the same as `spyglass bench cache`."""

import sys

from spyglass.bench.cache import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
