"""Frozen bytes pass through FSDP2 as they are, whatever numbers their bits would be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from spyglass.parallel.fsdp import Processes


@pytest.fixture
def alone() -> Iterator[Processes]:
    """One process that shards as if there were others."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield Processes(mesh=init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


def every_nan() -> torch.Tensor:
    """Words whose upper half is each bfloat16 NaN and each infinity: quiet and signalling, of both signs."""
    upper = torch.arange(1 << 16, dtype=torch.int32)
    upper = upper[(upper & 0x7F80) == 0x7F80]
    return torch.stack([upper << 16, upper << 16 | upper]).view(torch.uint8)


def frozen() -> dict[str, torch.Tensor]:
    bytes_ = torch.arange(256, dtype=torch.uint8)
    return {
        "NaNs": every_nan(),
        "odd": bytes_[:15].clone().view(3, 5),
        "one": bytes_[200:201].clone(),
        "off a boundary": bytes_[1:249].view(2, 4, 31),
        "across": bytes_.view(16, 16).T,
        "signed": bytes_.view(torch.int8),
        "wide": torch.arange(-3, 4),
    }


@pytest.mark.parametrize("trained", [False, True])
def test_integers_come_back_bit_by_bit_and_FSDP2_only_ever_holds_floats(trained: bool, alone: Processes) -> None:
    """torch 2.11 shards no others. Alone they are gathered as floats, beside trained ones of another dtype as bytes."""
    leaf = {"leaf": torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)} if trained else {}
    module, seen = nn.ReLU(), dict[str, torch.Tensor]()

    def bind(whole: Mapping[str, torch.Tensor]) -> None:
        seen.update({name: tensor.detach().clone() for name, tensor in whole.items()})

    alone.shard(module, frozen() | leaf, bind)
    held = list(module.parameters())
    assert len(held) == len(frozen() | leaf) and all(parameter.is_floating_point() for parameter in held)
    assert [parameter.requires_grad for parameter in held] == [False] * len(frozen()) + [True] * trained
    module(torch.ones(1))
    assert seen.keys() == (frozen() | leaf).keys()
    for name, tensor in (frozen() | leaf).items():
        assert seen[name].dtype == tensor.dtype and torch.equal(seen[name], tensor), name
