"""A program that unpacks images, one after the other, in a process that can be ended.

Decoders are other people's loops: a small file may keep one busy for hours. Whoever starts this (`python -m
spyglass.prompt.unpack`) sends each image on stdin and reads its patches, or why there are none, from stdout; an image
that takes too long or too much memory ends the process.
"""

from __future__ import annotations

import pickle
import resource
import signal
import sys
from typing import BinaryIO

import numpy as np

from spyglass.errors import PromptError
from spyglass.prompt.build import unpack_image
from spyglass.prompt.decode import open_image

LARGE = 300 << 20  # bytes that a process may have taken and still be kept


def serve(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Answer (file, rules, plan, name) with (error or None, shape, dtype, whether the process goes on) and the pixels.

    The first message has the limits: seconds of a processor, seconds of the clock, bytes.
    """
    cpu_seconds, wall_seconds, memory = pickle.load(stdin)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    while True:
        try:
            file, rules, plan, name = pickle.load(stdin)
        except EOFError:
            return
        _limit(cpu_seconds, wall_seconds)
        error, pixels = None, np.zeros(0, np.uint8)
        try:
            pixels = np.ascontiguousarray(unpack_image(open_image(file, name=name), rules, plan, name))
        except PromptError as fault:
            error = str(fault)
        _limit(0, 0)
        goes_on = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 < LARGE
        pickle.dump((error, pixels.shape, pixels.dtype.str, goes_on), stdout)
        stdout.write(pixels.data)
        stdout.flush()
        if not goes_on:
            return


def _limit(cpu_seconds: float, wall_seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)


if __name__ == "__main__":
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    serve(sys.stdin.buffer, sys.stdout.buffer)
