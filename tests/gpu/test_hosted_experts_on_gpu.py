"""Experts in host memory beside a GPU: what all on the GPU gives, copied or computed by the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spyglass import LLM
from spyglass.lora.pool import AdapterPool
from tests.adapter_parts import random_adapter, shapes_of
from tests.captured import assert_same_pages, decode
from tests.hosted_parts import HOSTED, make
from tests.tolerance import HOSTED_LOGITS_OF_RMS, HOSTED_OF_RMS

pytestmark = pytest.mark.gpu


def off(got: torch.Tensor, expected: torch.Tensor) -> float:
    got, expected = got.float(), expected.float()
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def differing(got: Any, expected: Any) -> list[str]:
    """Steps whose rows are not the same bits, with how far they are off."""
    pairs = enumerate(zip(got, expected, strict=True))
    each = [(n, a.hidden_TC, b.hidden_TC) for n, (a, b) in pairs if not torch.equal(a.hidden_TC, b.hidden_TC)]
    return [f"step {n}: {len(a)} rows, off by {off(a, b):.1e}" for n, a, b in each]


@pytest.mark.parametrize("family", ["v4", "v41"])
def test_steps_are_not_captured_and_give_the_same_bits_each_time(family: str) -> None:
    """Captured, they gave other sums than op by op."""
    hosted, options = make(family, "cuda", host=HOSTED)
    got, memory, runner = decode(hosted, **options)
    again, same, _ = decode(hosted, **options)
    assert runner.capture.backend == "eager" and not runner.capture.replays
    assert not differing(again, got)
    assert_same_pages(memory, same)


@pytest.mark.parametrize("rows", [1, 8, 256, 1000])
def test_a_layer_gives_what_it_gives_on_the_gpu(rows: int) -> None:
    """By the host's kernels and from a copy on the GPU."""
    whole, _ = make("v4", "cuda")
    hosted, _ = make("v4", "cuda", host=HOSTED)
    ours, theirs = (model.text.layers[HOSTED[0]].ffn.experts for model in (hosted, whole))
    generator = torch.Generator().manual_seed(rows)
    text = whole.config.text
    x_TC = torch.randn(rows, text.hidden_size, generator=generator).bfloat16().cuda()
    ids_TK = torch.rand(rows, text.n_routed_experts, generator=generator).topk(text.num_experts_per_tok).indices
    weights_TK = torch.rand(ids_TK.shape, generator=generator).cuda()
    side = hosted.options.build.host
    with torch.inference_mode():
        expected = theirs(x_TC, ids_TK.int().cuda(), weights_TK)
        for many in (1, rows + 1):
            side.many = many
            for _ in range(3):
                assert off(ours(x_TC, ids_TK.int().cuda(), weights_TK), expected) < HOSTED_OF_RMS


def test_adapters_of_experts_in_host_memory() -> None:
    hosted, _ = make("v4", "cuda", host=HOSTED)
    pool = AdapterPool(hosted)
    use = pool.attach("one", random_adapter(shapes_of(hosted), ["experts"], rank=3, seed=1))
    layer = hosted.text.layers[HOSTED[0]].ffn.experts
    assert all(tensor.device.type == "cpu" for tensor in layer.adapter.tensors())
    adapter_ids = (0, use.adapter_id, 0, use.adapter_id, 0)
    got, _, _ = decode(hosted, adapter_ids=adapter_ids)
    plain, _, _ = decode(hosted)
    assert off(got[-1].hidden_TC[:1], plain[-1].hidden_TC[:1]) == 0 and off(got[1].hidden_TC, plain[1].hidden_TC) > 0
    assert not differing(decode(hosted, adapter_ids=adapter_ids)[0], got)


def test_a_model_of_released_width_answers_alike() -> None:
    """Four layers of V4-Flash, two of them in host memory: logits of a short prompt and of one long enough to copy."""
    ids: list[Any] = [list(range(1000, 1100)), list(range(1000, 3000))]
    options: dict[str, Any] = {
        "load": "dummy", "images": 0, "max_length": 4096, "prefix_cache_bytes": 0, "numbers": "off", "max_sequences": 4,
    }  # fmt: skip
    logits = []
    for where in ("gpu", "auto:7"):
        llm = LLM("flash-4layer", experts=where, **options)
        logits.append([llm.logits(one) for one in ids])
        host = llm.loaded.model.options.build.host
        assert (host is None) == (where == "gpu")
        del llm, host
        torch.cuda.empty_cache()
    for got, expected in zip(logits[1], logits[0], strict=True):
        assert off(got, expected) < HOSTED_LOGITS_OF_RMS
