"""Training every weight of a checkpoint: what micro-batches add up to, and how experts are balanced."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spyglass.config.read import read_model_config
from spyglass.config.training import TrainConfig
from spyglass.train.balance import BIASES
from spyglass.train.full_finetune import BALANCE_RATE, FullRun
from spyglass.train.loop import Task
from spyglass.train.packing import Sample
from spyglass.train.recompute import recompute_layers
from tests.drafted import write_drafted
from tests.tolerance import GRADIENT_OF_MAX, LAW_OF_MAX
from tests.unit.train.samples import make_sample

pytestmark = pytest.mark.slow  # they load a checkpoint from disk
CPU = torch.device("cpu")
RULES = ("matrix", "other")
FIRST, SECOND, BOTH = 0, 1, 2  # numbers of micro-batches


class Run:
    """A tiny checkpoint behind its masters, with three micro-batches: one sample, another, and both together."""

    def __init__(self, folder: Path, *, recompute: bool = False) -> None:
        self.config = config = read_model_config(folder)
        options = TrainConfig(model=folder, data=folder, output=folder, full=True, dtype="float32", numerics="plain")
        run = FullRun(config, options, CPU, progress=False)
        if recompute:
            recompute_layers(run.model)
        one, other = make_sample(config, [12, (4, 6), 7], seed=1), make_sample(config, [30], seed=2)
        batches: list[list[Sample]] = [[one], [other], [one, other]]
        self.task: Task = run.task(lambda number: batches[number], {})
        self.biases = self.task.extra
        self._start = {name: bias.clone() for name, bias in self.biases.items()}

    def reset(self) -> None:
        """Biases as they were, no gradient."""
        for name, bias in self.biases.items():
            bias.copy_(self._start[name])
        for leaf in self.task.leaves.values():
            leaf.grad = None

    def step(self, *numbers: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
        """Gradients, moves of the biases and the summed loss of a step of these micro-batches, from the start."""
        self.reset()
        total = 0.0
        for number in numbers:
            part = self.task.loss(number)
            part.loss.backward()
            total += float(part.loss.detach())
        assert self.task.after_step is not None
        self.task.after_step(0)
        grads = {name: leaf.grad.clone() for name, leaf in self.task.leaves.items() if leaf.grad is not None}
        moves = {name: bias - self._start[name] for name, bias in self.biases.items()}
        return grads, moves, total


@pytest.fixture(scope="module")
def shared(tiny_folder: Path) -> Run:
    return Run(tiny_folder)


@pytest.fixture
def run(shared: Run) -> Iterator[Run]:
    yield shared
    shared.reset()


def test_accumulated_micro_batches_are_one_batch(run: Run) -> None:
    """Gradients of every stack and the loss add up; each micro-batch alone is something else."""
    cut, _, loss = run.step(FIRST, SECOND)
    whole, _, expected = run.step(BOTH)
    assert abs(loss - expected) <= LAW_OF_MAX * expected
    assert cut.keys() == whole.keys() and any("experts" in name for name in whole)
    for name, gradient in whole.items():
        assert (cut[name] - gradient).abs().max() <= GRADIENT_OF_MAX * gradient.abs().max(), name
    for number in (FIRST, SECOND):
        alone, _, _ = run.step(number)
        assert any((alone[n] - whole[n]).abs().max() > 0.1 * whole[n].abs().max() for n in alone.keys() & whole.keys())


def test_the_use_of_experts_adds_up_over_micro_batches(run: Run) -> None:
    """Biases move as they do after one batch of all rows, not as after either micro-batch alone, and once a step."""
    _, cut, _ = run.step(FIRST, SECOND)
    _, whole, _ = run.step(BOTH)
    assert all(torch.equal(move, whole[name]) for name, move in cut.items())
    for number in (FIRST, SECOND):
        _, alone, _ = run.step(number)
        assert any(not torch.equal(move, whole[name]) for name, move in alone.items())
    _, again, _ = run.step(BOTH)
    assert all(torch.equal(move, whole[name]) for name, move in again.items()), "a step's use is not the next one's"


def test_the_bias_of_a_busy_expert_falls_and_that_of_an_idle_one_rises(run: Run) -> None:
    """Expert 0 is made every row's choice and expert 1 none's: text by `gate.bias`, images by `gate.bias_vl`."""
    by_scores = [plan.index for plan in run.config.text.layers if plan.router == "topk"]
    routed = [f"layers.{index}{BIASES[0]}" for index in by_scores] + [
        name for name in run.biases if name.endswith(BIASES[1])
    ]
    assert by_scores and len(routed) > len(by_scores)
    for bias in run.biases.values():
        bias[0], bias[1] = 100.0, -100.0
    before = {name: bias.clone() for name, bias in run.biases.items()}
    run.task.loss(BOTH).loss.backward()
    assert run.task.after_step is not None
    run.task.after_step(0)
    for name in routed:
        bias = run.biases[name]
        assert (bias - before[name])[:2].sign().tolist() == [-1, 1], name
        assert ((bias[2:] - before[name][2:]).abs() <= 1.01 * BALANCE_RATE).all(), name


def test_layers_that_are_computed_again_count_once(tiny_folder: Path, run: Run) -> None:
    again = Run(tiny_folder, recompute=True)
    _, expected, _ = run.step(FIRST, SECOND)
    _, got, _ = again.step(FIRST, SECOND)
    assert any(move.any() for move in expected.values())
    assert all(torch.equal(move, expected[name]) for name, move in got.items())


def held() -> int:
    """Bytes of every tensor that Python can see."""
    found = [thing.untyped_storage() for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in found}.values())


def test_what_is_not_trained_and_the_spelling_stay_in_the_checkpoint(tmp_path: Path) -> None:
    folder, output = tmp_path / "base", tmp_path / "out"
    write_drafted(folder)
    options = TrainConfig(model=folder, data=folder, output=output, full=True, dtype="float32", numerics="plain")
    FullRun(read_model_config(folder), options, CPU, progress=False).write(output)
    before, after = (
        {name: tensor for path in place.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for place in (folder, output)
    )
    assert before.keys() == after.keys()
    drafts = [name for name in before if ".mtp.0." in name]
    assert len(drafts) > 20
    for name in drafts:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name


def test_the_manual_says_what_memory_a_weight_takes(tiny_folder: Path) -> None:
    """Master, both moments, the step's gradient, and the rounded copy that the modules read."""
    before = held()
    config = read_model_config(tiny_folder)
    options = TrainConfig(model=tiny_folder, data=tiny_folder, output=tiny_folder, full=True, numerics="plain")
    run = FullRun(config, options, CPU, progress=False)
    task = run.task(lambda number: [make_sample(config, [12, (4, 6), 7], seed=number)], {})
    for number in (FIRST, SECOND):
        task.loss(number).loss.backward()
    for leaf in task.leaves.values():  # also of what this sample did not use
        leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    task.optimisers[0].step()
    taken = held() - before
    counts = {rule: sum(stack.value.numel() for stack in run.masters.stacks if stack.rule == rule) for rule in RULES}
    manual = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    stated = re.search(r"takes (\d+) bytes a trained weight, (\d+) of\s+embedding, head and norms", manual)
    assert stated is not None and all(counts.values())
    assert taken == pytest.approx(sum(int(stated[n]) * counts[rule] for n, rule in enumerate(RULES, 1)), rel=0.02)
