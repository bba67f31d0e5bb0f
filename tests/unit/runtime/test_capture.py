"""Which graph a run comes from: one per key, all forgotten with other weights, made when a back end can make them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from spyglass.runtime import capture as capture_file
from spyglass.runtime.capture import Capture, Outputs, Run

X = torch.zeros(3)


class FakeGraph:
    def __init__(self, run: Run) -> None:
        self.outputs: Outputs = ()
        self._run = run

    def replay(self) -> Outputs:
        self.outputs = self._run()
        return self.outputs


class FakeCuda:
    """CUDA graphs without CUDA: warms up once, then captures without running."""

    made: list[str]

    def __init__(self, device: torch.device) -> None:
        self.made = []

    def capture(self, run: Run) -> FakeGraph:
        self.made.append(str(X.tolist()))
        if X[0] == -5:
            raise RuntimeError("operation not permitted when stream is capturing")
        run()
        return FakeGraph(run)

    def clear(self) -> None:
        self.made.append("cleared")


def double() -> Outputs:
    return (X * 2,)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> tuple[Capture, FakeCuda]:
    monkeypatch.setattr(capture_file, "CudaGraphs", FakeCuda)
    made: list[FakeCuda] = []
    monkeypatch.setattr(capture_file, "CudaGraphs", lambda device: made.append(FakeCuda(device)) or made[-1])
    return Capture("cuda_graph", max_graphs=2), made[0]


@contextmanager
def harmless() -> Iterator[None]:
    before = X.clone()
    X.fill_(-1)
    yield
    X.copy_(before)


def test_eager_runs_are_never_captured() -> None:
    capture = Capture("eager")
    for _ in range(3):
        assert torch.equal(capture.run("key", double)[0], X * 2)
    assert len(capture) == 0 and capture.replays == 0


def test_on_a_cpu_the_second_run_is_captured_and_the_third_replayed() -> None:
    capture = Capture("cpu_graph")
    for turn in range(4):
        X.fill_(turn)
        assert capture.run("key", double, lasting=lambda: [X])[0].tolist() == [2.0 * turn] * 3
        assert (len(capture), capture.replays) == (int(turn > 0), max(0, turn - 1))


def test_a_gpu_captures_first_on_inputs_that_change_nothing(cuda: tuple[Capture, FakeCuda]) -> None:
    capture, fake = cuda
    X.fill_(7)
    assert capture.run("key", double, harmless=harmless)[0].tolist() == [14.0] * 3
    X.fill_(8)
    assert capture.run("key", double, harmless=harmless)[0].tolist() == [16.0] * 3
    assert fake.made == ["[-1.0, -1.0, -1.0]"]


def test_other_weights_forget_all_graphs(cuda: tuple[Capture, FakeCuda]) -> None:
    capture, fake = cuda
    for state in (1, 1, 2):
        capture.use(state)
        capture.run("key", double)
    assert fake.made.count("cleared") == 2 and len(fake.made) == 4


def test_the_least_recently_used_graph_goes(cuda: tuple[Capture, FakeCuda]) -> None:
    capture, fake = cuda
    for key in ("a", "b", "a", "c", "a", "b"):
        capture.run(key, double)
    assert len(fake.made) == 4 and len(capture) == 2


def test_what_cannot_be_captured_runs_and_is_not_tried_again(cuda: tuple[Capture, FakeCuda]) -> None:
    capture, fake = cuda
    X.fill_(-5)
    for _ in range(3):
        assert capture.run("key", double)[0].tolist() == [-10.0] * 3
    assert len(fake.made) == 1 and sum(capture.eager.values()) == 1
    on_cpu = Capture("cpu_graph")
    for _ in range(4):
        assert on_cpu.run("key", lambda: (X[: int(X.sum().item()) + 18],))[0].tolist() == [-5.0] * 3
    assert len(on_cpu) == 0 and sum(on_cpu.eager.values()) == 1
