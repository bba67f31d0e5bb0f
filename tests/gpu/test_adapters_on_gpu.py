"""Adapters where nothing may be read back to the host: the same sums on a GPU, on text and on pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
import torch

from spyglass.batch.images import pack_images
from spyglass.lora.low_rank import AdapterFile
from spyglass.lora.pool import AdapterPool
from spyglass.ops.table import bind_ops
from spyglass.quant.packed import Packed
from tests.adapter_parts import Small, merged, random_adapter, small
from tests.driver import Part, build_step, memory_for, text_tokens
from tests.engine_parts import patches
from tests.small_models import HOST_AND_GPU, random_text
from tests.tolerance import assert_merged

TEXT = ["attention", "compressor", "indexer", "shared", "experts"]
GRIDS = ((4, 4), (3, 5), (2, 2))


@pytest.fixture(scope="module")
def world() -> Small:
    return small("v4", seed=13)


@pytest.mark.parametrize("device", HOST_AND_GPU)
def test_two_adapters_and_none_in_one_step_equal_their_merged_models(device: str, world: Small) -> None:
    adapters = [random_adapter(world.shapes, TEXT, rank=rank, seed=rank) for rank in (2, 5)]
    ops = bind_ops(device, "float32")
    tokens = [text_tokens(random_text(length, 3)) for length in (30, 17, 25)]

    def logits(weights: Mapping[str, Packed], attached: Sequence[AdapterFile] = ()) -> list[torch.Tensor]:
        """Of three prompts; with two adapters the first has none, the others one each."""
        model = world.model(weights, device=device, ops=ops)
        pool = AdapterPool(model)
        adapter_ids = [
            0,
            *(pool.attach(str(number), adapter).adapter_id for number, adapter in enumerate(attached)),
            0,
            0,
        ]
        parts = [Part(sequence=s, tokens=each, start=0) for s, each in enumerate(tokens)]
        batch, cache, _ = build_step(memory_for(model, 3, 30), parts)
        adapter_T = torch.tensor(adapter_ids, dtype=torch.int32, device=device)[batch.seq_T.long()]
        with torch.inference_mode():
            out = model(dataclasses.replace(batch, adapter_T=adapter_T), cache)
        return list(out.cpu().split([len(each) for each in tokens]))

    live = logits(world.weights, adapters)
    for number, weights in enumerate([world.weights, *(merged(world.weights, adapter) for adapter in adapters)]):
        assert_merged(live[number], logits(weights)[number], f"request {number}")


@pytest.mark.parametrize("device", HOST_AND_GPU)
def test_each_picture_is_seen_through_its_own_adapter(device: str, world: Small) -> None:
    adapter = random_adapter(world.shapes, ["tower", "aligner"], rank=3, seed=1)
    ops = bind_ops(device, "float32")
    vision = world.config.vision
    assert vision is not None
    given = [patches(*grid, seed=number).pixels for number, grid in enumerate(GRIDS)]
    cells = [-(-rows // 2) * -(-columns // 2) for rows, columns in GRIDS]

    def encode(weights: Mapping[str, Packed], attached: Sequence[AdapterFile] = ()) -> list[torch.Tensor]:
        """Of three pictures; the second never has an adapter."""
        model = world.model(weights, device=device, ops=ops)
        pool = AdapterPool(model)
        adapter_ids = [pool.attach(str(number), each).adapter_id for number, each in enumerate(attached)] or [0]
        images = pack_images(given, GRIDS, vision, device=device, adapter_ids=[adapter_ids[0], 0, adapter_ids[0]])
        with torch.inference_mode():
            return list(model.encode_images(images).cpu().split(cells))

    live, plain = encode(world.weights, [adapter]), encode(world.weights)
    whole = encode(merged(world.weights, adapter))
    for number, expected in enumerate([whole[0], plain[1], whole[2]]):
        assert_merged(live[number], expected, f"picture {number}")
    assert (live[0] - plain[0]).abs().max() > 1e-2
