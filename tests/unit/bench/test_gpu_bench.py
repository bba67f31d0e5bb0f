"""The bounds of the GPU benchmark count what a step reads and multiplies; without a GPU it says so."""

from __future__ import annotations

import pytest
import torch

from spyglass import LLM
from spyglass.bench.gpu import active_weights, decode_bytes, run
from spyglass.layers.build import held_tensors


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([])
    assert "no CUDA device" in capsys.readouterr().err


def test_a_step_reads_more_experts_the_more_rows_it_has_and_never_more_than_all() -> None:
    llm = LLM("tiny", load="dummy", images=0, max_length=256)
    whole = sum(
        tensor.nbytes for part in (llm.loaded.model.text, llm.loaded.model.head) for tensor in held_tensors(part)
    )
    sizes = [decode_bytes(llm, batch, 0)[0] for batch in (1, 2, 8, 10_000)]
    assert sizes[0] < sizes[1] < sizes[2] < whole and sizes[-1] == pytest.approx(whole)
    text = llm.config.text
    experts = text.num_experts_per_tok * 3 * text.hidden_size * text.moe_intermediate_size * text.num_hidden_layers
    assert experts < active_weights(llm) < experts + 5_000_000


def test_bytes_of_experts_in_host_memory_are_read_there() -> None:
    llm, hosted = (LLM("tiny", load="dummy", images=0, max_length=256, experts=where) for where in ("gpu", "host"))
    for batch in (1, 8):
        whole, (device, host) = decode_bytes(llm, batch, 64)[0], decode_bytes(hosted, batch, 64)
        assert 0 < host < whole and device + host == pytest.approx(whole)
    assert active_weights(hosted) == active_weights(llm)
