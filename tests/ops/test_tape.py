"""A tape is the code that was recorded, for other inputs; what a tape cannot hold gives none."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from spyglass.ops.build import isas
from spyglass.ops.cache_write.cpu import cache_write
from spyglass.ops.native import Kernels
from spyglass.ops.rms_norm.cpu import rms_norm
from spyglass.ops.swiglu.cpu import swiglu
from spyglass.ops.tape import Recorder, Tape
from tests.ops.cpu_kernels import DTYPES, kernels

Inputs = tuple[torch.Tensor, ...]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(kernels(isas()[0]))


def given(seed: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """x, weight, pages and where to write."""
    source = torch.Generator().manual_seed(seed)
    x_TC, weight_C = torch.randn(6, 32, generator=source).to(dtype), torch.randn(32, generator=source)
    return x_TC, weight_C, torch.zeros(2, 3, 32, dtype=dtype), torch.randperm(6, generator=source)


def chain(
    library: Kernels, x_TC: torch.Tensor, weight_C: torch.Tensor, pages: torch.Tensor, write: torch.Tensor
) -> torch.Tensor:
    """Results that are read soon, late and twice, parts of inputs and of results, and a write in place."""
    early = rms_norm(x_TC, weight_C, eps=1e-6, kernels=library)
    parts = rms_norm(early.view(-1, 8), weight_C[8:16], eps=1e-3, kernels=library).view(x_TC.shape)
    gated = swiglu(early, parts, limit=0.7, kernels=library)
    cache_write(pages, gated[2:], write[2:], kernels=library)
    normed = rms_norm(gated, None, eps=1e-6, kernels=library)
    return swiglu(rms_norm(normed, weight_C, eps=0.1, kernels=library), early, limit=2.0, kernels=library)


def recorded(recorder: Recorder, run: Callable[..., torch.Tensor], inputs: Inputs) -> Tape | None:
    return recorder.record(lambda: run(recorder.kernels, *inputs), inputs, [])[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tape_gives_the_bits_of_the_code_for_other_inputs(recorder: Recorder, dtype: torch.dtype) -> None:
    first = given(0, dtype)
    out, tape = recorder.record(lambda: chain(recorder.kernels, *first), first, [])
    assert tape is not None
    expected, again = given(0, dtype), given(0, dtype)
    assert torch.equal(out, chain(recorder.kernels, *expected)) and torch.equal(first[2], expected[2])
    for seed in (1, 2, 0, 3):
        expected, again = given(seed, dtype), given(seed, dtype)
        want = chain(recorder.kernels, *expected)
        assert torch.equal(tape.replay([tensor.data_ptr() for tensor in again]), want)
        assert torch.equal(again[2], expected[2]) and expected[2].any()


def test_results_share_memory_once_they_have_been_read(recorder: Recorder) -> None:
    x = torch.randn(64, 64)

    def run(library: Kernels, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = rms_norm(x, None, eps=1e-6, kernels=library)
        return x

    tape = recorded(recorder, run, (x,))
    assert tape is not None and tape.nbytes == 2 * x.nbytes


@pytest.mark.parametrize(
    "strange",
    [
        lambda y: y + 1,
        lambda y: y.mul_(2),
        lambda y: y[torch.tensor([1, 0])],
        lambda y: y.to(torch.bfloat16),
        lambda y: y[: int(y[0, 0].item() > 9) - 1],
        lambda y: y[: len((y > 0).nonzero())],
        lambda y: torch.zeros_like(y),
    ],
)
def test_code_that_does_anything_else_has_no_tape(
    recorder: Recorder, strange: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def run(library: Kernels, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(strange(rms_norm(x, None, eps=1e-6, kernels=library)), None, eps=1e-6, kernels=library)

    assert recorded(recorder, run, (torch.randn(4, 8),)) is None
    assert recorded(recorder, lambda library, x: rms_norm(x, None, eps=1e-6, kernels=library), (torch.randn(4, 8),))


def test_memory_that_nobody_promises_to_keep_gives_no_tape(recorder: Recorder) -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)

    def run() -> torch.Tensor:
        return rms_norm(x, weight, eps=1e-6, kernels=recorder.kernels)

    assert recorder.record(run, [x], [])[1] is None
    tape = recorder.record(run, [x], [torch.randn(8), weight])[1]
    assert tape is not None and torch.equal(tape.replay([x.data_ptr()]), run())


def test_calls_of_other_threads_are_not_on_a_tape(recorder: Recorder) -> None:
    x, elsewhere = torch.randn(4, 8), torch.zeros(1, 3, 8)
    theirs = elsewhere, torch.ones(1, 8), torch.tensor([1])

    def run(library: Kernels, x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=cache_write, args=theirs, kwargs={"kernels": library})
        other.start()
        other.join()
        return rms_norm(x, None, eps=1e-6, kernels=library)

    tape = recorded(recorder, run, (x,))
    assert tape is not None and elsewhere.any()
    elsewhere.zero_()
    tape.replay([x.data_ptr()])
    assert not elsewhere.any()


def test_a_failure_while_recording_ends_the_recording(recorder: Recorder) -> None:
    def run(library: Kernels, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        recorded(recorder, run, (torch.randn(4, 8),))
    test_a_tape_gives_the_bits_of_the_code_for_other_inputs(recorder, torch.float32)


def test_recording_does_not_load_the_compiler_of_torch() -> None:
    """Its import would hold the first answers of a process for most of a second."""
    kernels(isas()[0])
    program = (
        "import sys, torch; from spyglass.ops.native import best; from spyglass.ops.tape import Recorder\n"
        "from spyglass.ops.rms_norm.cpu import rms_norm\n"
        "recorder, x = Recorder(best()), torch.ones(2, 8)\n"
        "_, tape = recorder.record(lambda: rms_norm(x, None, eps=0.0, kernels=recorder.kernels), [x], [])\n"
        "print(tape is not None and 'torch._dynamo' not in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
