"""Each rank of a divided model reads its part of the files once; the parts of all are the whole, byte by byte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from spyglass.checkpoint.random import new_checkpoint
from spyglass.errors import CheckpointError, ConfigError
from spyglass.layers.embedding import Embedding, PlainTensor
from spyglass.layers.linear import Experts, GroupedLinear, Linear
from spyglass.model import LoadedModel, load_model
from spyglass.parallel.group import Group
from spyglass.params.shard import Shard
from spyglass.quant.packed import Packed
from tests.ranks import DIVISIBLE
from tests.unit.checkpoint.small_files import write_small


class Silent(Group):
    """A group of which only the sizes are asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def load(folder: Path, rank: int = 0, size: int = 1, **options: Any) -> LoadedModel:
    options = {"dtype": "float32", "ops": "reference", "progress": False, **options}
    return load_model(folder, shard=Shard(rank, size), group=Silent(rank, size), **options)


def held(loaded: LoadedModel) -> dict[str, list[torch.Tensor]]:
    """Stored tensors by name: the weight, then its scale."""
    found: dict[str, list[torch.Tensor]] = {}

    def take(name: str, weight: Packed) -> None:
        data = weight.data.view(torch.uint8) if weight.data.itemsize == 1 else weight.data
        found[name] = [data] if weight.scale is None else [data, weight.scale]

    for module in loaded.model.modules():
        if isinstance(module, Linear | GroupedLinear):
            assert module.weight is not None
            take(module.name, module.weight)
        elif isinstance(module, Experts):
            for number, expert in enumerate(module.held):
                for matrix, stack in module.stacks.items():
                    take(f"{module.name}.{expert}.{matrix}", stack[number])
        elif isinstance(module, Embedding):
            assert module.weight_VC is not None
            found[module.name] = [module.weight_VC]
        elif isinstance(module, PlainTensor) and module.value is not None:
            found[module.name] = [module.value]
    return found


def write(folder: Path, kind: str) -> Path:
    if kind == "v41":
        new_checkpoint(folder, "tiny-v41", seed=0)
    else:
        write_small(folder, packed=kind != "v4", names="hf" if kind == "v4 stacked" else "native", **DIVISIBLE)
    return folder


def joined(name: str, parts: list[list[torch.Tensor]], loaded: LoadedModel) -> list[torch.Tensor]:
    param = loaded.model.params[name]
    if param.split in ("none", "experts"):
        assert all(torch.equal(a, b) for part in parts for a, b in zip(part, parts[0], strict=True)), name
        return parts[0]
    axis = 0 if param.split == "rows" else 1
    return [torch.cat(tensors, axis) for tensors in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    ("kind", "size"), [("v4", 2), ("v4 packed", 4), ("v4 packed", 2), ("v4 stacked", 2), ("v41", 2)]
)
def test_the_parts_of_all_ranks_are_the_whole(tmp_path: Path, kind: str, size: int) -> None:
    folder = write(tmp_path / "model", kind)
    whole = held(load(folder))
    ranks = [load(folder, rank, size) for rank in range(size)]
    parts = [held(rank) for rank in ranks]
    assert set(whole) == {name for part in parts for name in part}
    for name, tensors in whole.items():
        mine = [part[name] for part in parts if name in part]
        assert len(mine) == (1 if ranks[0].model.params[name].split == "experts" else size), name
        for one, other in zip(joined(name, mine, ranks[0]), tensors, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other), name


@pytest.mark.parametrize("kind", ["v4 packed", "v41"])
def test_a_rank_reads_its_bytes_and_no_others_once(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reads of all ranks: each byte of what is divided by one, of what all have by each."""
    folder = write(tmp_path / "model", kind)
    reads: list[tuple[int, int, int]] = []
    preadv = os.preadv

    def spy(descriptor: int, buffers: Any, offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        reads.append((os.fstat(descriptor).st_ino, offset, count))
        return count

    monkeypatch.setattr(os, "preadv", spy)
    read = []
    for rank in range(2):
        reads.clear()
        report = load(folder, rank, 2).report
        ends: dict[int, int] = {}
        for inode, offset, count in sorted(reads):
            assert offset >= ends.get(inode, 0), "no byte is read twice"
            ends[inode] = offset + count
        assert sum(count for *_, count in reads) == report.nbytes
        read.append(report.nbytes)
    whole = load(folder)
    params = whole.model.params
    divided = sum(t.nbytes for name, each in held(whole).items() if params[name].split != "none" for t in each)
    assert sum(read) == 2 * whole.report.nbytes - divided


def test_a_packed_weight_that_cannot_be_cut_is_refused_by_name(tmp_path: Path) -> None:
    write_small(tmp_path, **{**DIVISIBLE, "o_lora_rank": 16})
    with pytest.raises(ConfigError, match=r"wo_[ab] stored as fp8 32x32 cannot be cut among 4 processes"):
        load(tmp_path, 0, 4)


@pytest.mark.parametrize("size", [3, 8])
def test_numbers_that_do_not_divide_the_model_are_refused_with_those_that_do(tmp_path: Path, size: int) -> None:
    write_small(tmp_path, **DIVISIBLE)
    with pytest.raises(ConfigError, match=f"is {size}, but this model divides into 1, 2, 4 processes"):
        load(tmp_path, 0, size)


def test_what_a_rank_does_not_read_is_still_checked(tmp_path: Path) -> None:
    """A rank whose own part is sound says what is wrong with the checkpoint, as all others do."""
    write_small(tmp_path, packed=False, **{**DIVISIBLE, "hidden_size": 64})
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"n_routed_experts": 8', '"n_routed_experts": 12'))
    with pytest.raises(CheckpointError, match=r"missing.*experts\.8\.w1"):
        load(tmp_path, 0, 2)


def test_drawn_weights_that_all_ranks_have_are_the_same(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "v4 packed")
    parts = [held(load(folder, rank, 2, load="dummy")) for rank in range(2)]
    params = load(folder).model.params
    for name in parts[0].keys() & parts[1].keys():
        if params[name].split == "none":
            assert all(torch.equal(a, b) for a, b in zip(parts[0][name], parts[1][name], strict=True)), name
