"""A model divided among GPUs, its sums inside captured graphs, answers as on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spyglass.engine.llm import LLM
from spyglass.engine.request import SamplingParams
from tests.ranks import DIVISIBLE
from tests.small_models import random_text
from tests.unit.checkpoint.small_files import write_small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a model is divided among at least two GPUs"),
]


def test_answers_of_two_gpus_are_those_of_one(tmp_path: Path) -> None:
    write_small(tmp_path, packed=False, **DIVISIBLE)
    given = [random_text(length, length, 68).tolist() for length in (40, 9, 200)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = []
    for size in (1, 2):
        llm = LLM(tmp_path, "cuda", "float32", "plain", tensor_parallel_size=size, max_sequences=4)
        together = [output.token_ids for output in llm.generate(given, params)]
        assert together == [llm.generate([ids], params)[0].token_ids for ids in given], "whatever shares the step"
        assert size == 1 or llm.engine.step_runner.capture.replays
        found.append(together)
        llm.close()
    assert found[0] == found[1]
