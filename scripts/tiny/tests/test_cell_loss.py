"""The loss of places: what it asks for, and that it moves the tower and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from scripts.tiny.cell_loss import PARTS, cell_places, place_loss, place_names
from scripts.tiny.tests.test_trainer import SMALL, config_of, few_samples, small_weights, tensors_of, trainer_of
from spyglass.train.loss import IGNORED
from tests.tolerance import GRADIENT_OF_MAX


def test_a_cell_stands_where_its_centre_is_in_its_picture() -> None:
    ratio = 3
    places = cell_places([(7, 12), (3, 3), (1, 40)], ratio)
    expected = []
    for rows, columns in ((7, 12), (3, 3), (1, 40)):
        for y in range(0, rows, ratio):
            for x in range(0, columns, ratio):
                middle = [(first + min(first + ratio, end)) / 2 / end for first, end in ((x, columns), (y, rows))]
                expected.append([int(PARTS * share) for share in middle])
    assert places.tolist() == expected
    assert places.min() >= 0 and places.max() < PARTS
    assert cell_places([], ratio).shape == (0, 2)


def test_rows_that_name_their_place_lose_least() -> None:
    names = place_names(256, torch.device("cpu"))
    places = torch.tensor([[3, 17], [0, 0], [19, 4], [IGNORED, IGNORED]])
    named = torch.stack([names[0, x] + names[1, y] for x, y in places[:3].tolist()] + [torch.full((256,), 1e4)])
    swapped = torch.stack([names[0, y] + names[1, x] for x, y in places[:3].tolist()] + [torch.zeros(256)])
    assert place_loss(named, names, places) < 0.01 < 1 < place_loss(swapped, names, places)
    assert float(place_loss(swapped, names, places)) == pytest.approx(float(place_loss(swapped[:3], names, places[:3])))
    even = place_loss(torch.zeros(4, 256), names, places)
    assert float(even) == pytest.approx(math.log(PARTS))
    assert float(place_loss(named, names, torch.full((4, 2), IGNORED))) == 0.0
    rounded = named.bfloat16()
    assert place_loss(rounded, names, places) == place_loss(rounded.float(), names, places), "in fp32 whatever rows are"


@pytest.mark.parametrize("width", [64, 4096])
def test_scores_of_rows_that_know_nothing_are_as_large_in_any_width(width: int) -> None:
    """Else the loss would begin far above log PARTS in a wide model, and its gradient with it."""
    names = place_names(width, torch.device("cpu"))
    assert torch.equal(names, place_names(width, torch.device("cpu"))), "a resumed run asks for the same"
    rows = torch.randn(500, width, generator=torch.Generator().manual_seed(1))
    scores = torch.einsum("ic,apc->iap", rows, names)
    assert 1.8 < float(scores.std()) < 2.2
    assert math.log(PARTS) < place_loss(7 * rows, names, torch.arange(1000).view(500, 2) % PARTS) < 2 * math.log(PARTS)


def test_its_rate_alone_decides_whether_it_is_learned() -> None:
    config = config_of()
    tensors = tensors_of(few_samples(config), config, SMALL)
    losses = {}
    for rate in (0.0, 1.0):
        trainer = trainer_of(config, small_weights(config), SMALL, numerics="plain")
        trainer.place_rate.fill_(rate)
        trainer.optimiser.rate.fill_(0.02)
        losses[rate] = [float(trainer.step(tensors).places) for _ in range(40)]
    assert losses[0.0][0] == losses[1.0][0]
    assert losses[1.0][-1] < 0.5 * losses[1.0][0] < losses[0.0][-1]


def test_places_count_as_much_as_a_target_however_many_targets_there_are() -> None:
    """What falls is mean loss + rate · places, and the optimiser divides by the number of targets."""
    config = config_of()
    trainer = trainer_of(config, small_weights(config), SMALL, numerics="plain")
    trainer.optimiser.rate.fill_(0.0)
    tensors = tensors_of(few_samples(config), config, SMALL)
    few = tensors | {
        "targets_R": torch.where(torch.arange(len(tensors["targets_R"])) % 3 == 0, tensors["targets_R"], IGNORED)
    }
    aligner = next(n for n, stack in enumerate(trainer.masters.stacks) if "aligner.w1" in " ".join(stack.names))

    def gradient(step: dict[str, torch.Tensor], rate: float) -> torch.Tensor:
        trainer.place_rate.fill_(rate)
        count = trainer.step(step).count
        found = trainer.masters.leaves[aligner].grad
        assert found is not None
        return found / count

    of_all, of_few = (gradient(step, 2.0) - gradient(step, 0.0) for step in (tensors, few))
    assert of_all.any()
    assert (of_all - of_few).abs().max() <= GRADIENT_OF_MAX * of_all.abs().max()
