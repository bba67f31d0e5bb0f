"""Tokens that a small model is never taught to say can be told from each other, so that an adapter can teach them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from scripts.tiny.models import FAMILIES, NAMES, Family
from scripts.tiny.pairs import weights_of
from scripts.tiny.tests.test_trainer import SMALL, config_of, small_weights, trainer_of
from scripts.tiny.train import write_checkpoint
from scripts.tiny.untaught import APART, set_apart
from spyglass.config.read import read_model_config
from spyglass.config.shipped import find_model
from spyglass.params.table import param_table


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_rows_of_a_shipped_head_are_one(family: Family) -> None:
    folder = find_model(NAMES[family])
    config = read_model_config(folder)
    head_VD = weights_of(folder, config)("head", param_table(config)["head"])
    alike_VV = normalize(head_VD - head_VD.mean(dim=0)) @ normalize(head_VD - head_VD.mean(dim=0)).T
    assert alike_VV.fill_diagonal_(0).max() < 0.99


def test_rows_never_taught_keep_their_mean_and_directions_and_the_others_all() -> None:
    source = torch.Generator().manual_seed(0)
    head_VD, taught_V = torch.randn(40, 16, generator=source), torch.arange(40) < 10
    head_VD[10:] = head_VD[10] + 1e-3 * torch.randn(30, 16, generator=source)
    moved_VD = set_apart(head_VD, taught_V)
    mean_D = head_VD[10:].mean(dim=0)
    assert torch.equal(moved_VD[:10], head_VD[:10])
    assert torch.allclose((moved_VD[10:] - mean_D).norm(dim=1), torch.full((30,), APART), rtol=1e-3)
    along_U = (normalize(moved_VD[10:] - mean_D) * normalize(head_VD[10:] - mean_D)).sum(dim=1)
    assert along_U.min() > 0.999


def test_a_row_that_has_no_other_to_be_told_from_stays() -> None:
    head_VD = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(set_apart(head_VD, torch.arange(6) > 0), head_VD), "a single one"
    assert torch.equal(set_apart(head_VD, torch.ones(6, dtype=torch.bool)), head_VD), "none"
    alike_VD = torch.ones(6, 16)
    assert torch.equal(set_apart(alike_VD, torch.arange(6) > 3), alike_VD), "no direction of its own"


def test_a_checkpoint_is_written_with_the_rows_that_were_never_taught_apart(tmp_path: Path) -> None:
    config = config_of()
    trainer = trainer_of(config, small_weights(config), SMALL)
    taught_V = torch.arange(config.text.vocab_size) % 2 == 0
    (tmp_path / "model-00009-of-00009.safetensors").write_bytes(b"of another run")
    write_checkpoint(trainer, tmp_path, taught_V)
    assert not (tmp_path / "model-00009-of-00009.safetensors").exists()
    written_VD = weights_of(tmp_path, config)("head", trainer.masters.specs["head"])
    master_VD = trainer.masters.packed()["head"].data.float()
    assert torch.equal(written_VD[taught_V], master_VD[taught_V])
    assert torch.equal(written_VD, set_apart(master_VD, taught_V).bfloat16().float()), "rounded once"
