"""A number in config.json is refused when it is read, or the model answers, in either family.

Fields that give shapes are left out: with another value the files do not fit, which is told by name.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from spyglass.checkpoint.random import random_item
from spyglass.checkpoint.save import save_checkpoint
from spyglass.config.read import parse_model_config
from spyglass.engine.llm import LLM
from spyglass.engine.request import SamplingParams
from spyglass.errors import CapacityError, CheckpointError, ConfigError, PromptError
from spyglass.params.table import param_table
from tests.small_models import SMALL
from tests.small_v41 import SMALL_V41

BOTH = (
    "bos_token_id eos_token_id max_position_embeddings num_nextn_predict_layers image_token_id text.index_topk "
    "text.num_experts_per_tok text.sliding_window text.hc_sinkhorn_iters text.hc_eps text.rms_norm_eps "
    "text.rope_theta text.compress_rope_theta text.routed_scaling_factor text.swiglu_limit "
    "text.rope_scaling.factor text.rope_scaling.beta_fast text.rope_scaling.beta_slow "
    "text.rope_scaling.original_max_position_embeddings"
).split()
FIELDS = {
    "v4": [
        *(name.removeprefix("text.") for name in BOTH),
        *"num_hash_layers vision_rope_theta vision_max_n_token vision_min_pixels vision_max_wh_ratio".split(),
    ],
    "v41": [
        *(name.replace("text.", "text_config.") for name in BOTH),
        *(f"vision_config.{name}" for name in ("rope_theta", "max_image_tokens", "min_pixels", "max_wh_ratio")),
        *"text_config.candidate_topk_blocks text_config.candidate_block_size "
        "text_config.candidate_source_layer_id".split(),
    ],
}
NUMBERS = [-1, 0, 1, 2, 2**31 - 1, 2**31, 1.2e-38, 1e-39, 1e-7, 0.5, 1.0000001, 3.4e38]
BASES: dict[str, dict[str, Any]] = {
    "v4": SMALL,
    "v41": SMALL_V41 | {"text_config": SMALL_V41["text_config"] | {"engram_layer_ids": []}},
}


@pytest.fixture(scope="module", params=["v4", "v41"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("model")
    specs = param_table(parse_model_config(BASES[request.param], "config.json"))
    save_checkpoint(folder, [random_item(name, spec, seed=1, format=spec.format) for name, spec in specs.items()])
    yield request.param, folder


def changed(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(values)
    *sections, key = path.split(".")
    section = values
    for name in sections:
        section = section[name]
    section[key] = value
    return values


@pytest.mark.slow
def test_h13_a_number_is_refused_when_it_is_read_or_the_model_answers(stored: tuple[str, Path]) -> None:
    family, folder = stored
    base, answered, refused = BASES[family], 0, 0
    for path in FIELDS[family]:
        for value in NUMBERS:
            values = changed(base, path, value)
            try:
                parse_model_config(values, "config.json")
            except ConfigError as error:
                assert path.rpartition(".")[2] in str(error), (path, value)
                refused += 1
                continue
            (folder / "config.json").write_text(json.dumps(values))
            try:
                llm = LLM(folder, device="cpu", max_sequences=1, dtype="float32")
            except (CheckpointError, PromptError):  # files that do not fit it: `check` says that too
                continue
            with contextlib.suppress(PromptError, CapacityError):  # a length too short for this, an id that is taken
                llm.generate([[0, *range(5, 25)]], SamplingParams(max_tokens=2))
                llm.generate([[[0], Image.new("RGB", (40, 20))]], SamplingParams(max_tokens=1))
            answered += 1
    assert answered > 50 and refused > 50
