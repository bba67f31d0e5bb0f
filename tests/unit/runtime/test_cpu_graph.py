"""A captured graph is the code that was captured, for other contents of its inputs; what it cannot hold gives none."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from spyglass.ops.build import isas
from spyglass.ops.cache_write.cpu import cache_write
from spyglass.ops.rms_norm.cpu import rms_norm
from spyglass.ops.swiglu.cpu import swiglu
from spyglass.runtime.cpu_graph import CpuGraph, Uncapturable, capture
from tests.ops.cpu_kernels import DTYPES, kernels

Inputs = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def _library() -> None:
    kernels(isas()[0])


def given(seed: int, dtype: torch.dtype = torch.float32) -> Inputs:
    """x, weight, pages and where to write."""
    source = torch.Generator().manual_seed(seed)
    x_TC, weight_C = torch.randn(6, 32, generator=source).to(dtype), torch.randn(32, generator=source)
    return x_TC, weight_C, torch.zeros(2, 3, 32, dtype=dtype), torch.randperm(6, generator=source)


def chain(x_TC: torch.Tensor, weight_C: torch.Tensor, pages: torch.Tensor, write: torch.Tensor) -> Inputs:
    """Results that are read soon, late and twice, parts of inputs and of results, and a write in place."""
    early = rms_norm(x_TC, weight_C, eps=1e-6)
    parts = rms_norm(early.view(-1, 8), weight_C[8:16], eps=1e-3).view(x_TC.shape)
    gated = swiglu(early, parts, limit=0.7)
    cache_write(pages, gated[2:], write[2:])
    normed = rms_norm(gated, None, eps=1e-6)
    return (swiglu(rms_norm(normed, weight_C, eps=0.1), early, limit=2.0),)


def mixed(x_TC: torch.Tensor, weight_C: torch.Tensor, pages: torch.Tensor, write: torch.Tensor) -> Inputs:
    """Torch operations between kernels: new memory, in place, several results, constants, and views of all of them."""
    scale = torch.zeros(len(x_TC), 1, dtype=x_TC.dtype)
    scale[:, 0] = 0.5
    x_TC = rms_norm((x_TC * scale).view(-1, 16), weight_C[:16].exp(), eps=1e-6).view(x_TC.shape)
    best = x_TC.float().sort(dim=-1)
    x_TC = swiglu(best.values.to(x_TC.dtype), x_TC, limit=0.7)
    x_TC.add_(1)
    cache_write(pages, x_TC.index_select(0, write), write)
    return x_TC, rms_norm(x_TC, None, eps=1e-6), best.indices[:, :2]


def graph_of(run: Callable[..., Inputs], inputs: Inputs) -> CpuGraph:
    return capture(lambda: run(*inputs), inputs)


@pytest.mark.parametrize("code", [chain, mixed])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_graph_gives_the_bits_of_the_code_for_other_contents(
    code: Callable[..., Inputs], dtype: torch.dtype, mode: Callable[[], torch.inference_mode]
) -> None:
    with mode():
        inputs = given(0, dtype)
        graph = graph_of(code, inputs)
        for seed in (0, 1, 2, 0, 3):
            expected = given(seed, dtype)
            for mine, theirs in zip(inputs, expected, strict=True):
                mine.copy_(theirs)
            want, got = code(*expected), graph.replay()
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))
            assert torch.equal(inputs[2], expected[2]) and expected[2].any()


def test_results_share_memory_once_they_have_been_read() -> None:
    def run(x: torch.Tensor) -> Inputs:
        for _ in range(20):
            x = rms_norm(x, None, eps=1e-6)
        return (x,)

    x = torch.randn(64, 64)
    assert graph_of(run, (x,)).nbytes == 2 * x.nbytes


@pytest.mark.parametrize(
    "reads",
    [
        lambda y: y[: int(y[0, 0].item() > 9) - 1],
        lambda y: y[: len((y > 0).nonzero())],
        lambda y: y[y[:, 0] > -9],
        lambda y: y + torch.randn_like(y),
    ],
)
def test_code_that_reads_values_on_the_host_has_no_graph(reads: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def run(x: torch.Tensor) -> Inputs:
        return (rms_norm(reads(rms_norm(x, None, eps=1e-6)), None, eps=1e-6),)

    with pytest.raises(Uncapturable):
        graph_of(run, (torch.randn(4, 8),))


def test_memory_that_nobody_promises_to_keep_gives_no_graph() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)

    def run() -> Inputs:
        return (rms_norm(x, weight, eps=1e-6),)

    with pytest.raises(Uncapturable, match="promised"):
        capture(run, [x])
    graph = capture(run, [x, torch.randn(8), weight])
    assert torch.equal(graph.replay()[0], run()[0])


def test_calls_of_other_threads_are_not_in_a_graph() -> None:
    x, elsewhere = torch.randn(4, 8), torch.zeros(1, 3, 8)

    def run(x: torch.Tensor) -> Inputs:
        other = threading.Thread(target=cache_write, args=(elsewhere, torch.ones(1, 8), torch.tensor([1])))
        other.start()
        other.join()
        return (rms_norm(x, None, eps=1e-6),)

    graph = graph_of(run, (x,))
    assert elsewhere.any()
    elsewhere.zero_()
    graph.replay()
    assert not elsewhere.any()


def test_a_failure_while_capturing_ends_the_capture() -> None:
    def run(x: torch.Tensor) -> Inputs:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        graph_of(run, (torch.randn(4, 8),))
    graph_of(chain, given(0))


def test_capturing_does_not_load_the_compiler_of_torch() -> None:
    """Its import would hold the first answers of a process for most of a second."""
    program = (
        "import sys, torch; from spyglass.runtime.cpu_graph import capture\n"
        "from spyglass.ops.rms_norm.cpu import rms_norm\n"
        "x = torch.ones(2, 8)\n"
        "capture(lambda: (rms_norm(x + 1, None, eps=0.0),), [x])\n"
        "print('torch._dynamo' not in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
