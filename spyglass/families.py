"""The model families, one record each: all that anything beside the two readers of config.json must know of one.

A new family is a record here, a reader in `config` and, if its layers are wired in a new way, a backbone in `text`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`name` is `model_type` in config.json, `short_name` what command lines say, `title` what people read.

    Wiring: `q_head_norm` (queries are normed per head), `shifted_hyper` (what a sub-layer reads is mixed with the
    weights of the sub-layer before it, and there is no `hc_head`). `image_layout` of the token block of an image.
    `renderer`: the class of `deepseek_recipe` that renders conversations. Tool calls are written
    `<{DSML}{tag_space}{calls_tag}>`. `special_tokens`: reserved ids that the release names. `markov_head`: the two
    matrices of a draft stage's head. `presets`: configurations of `config.presets`, the released one last.
    """

    name: str
    short_name: str
    title: str
    q_head_norm: bool
    shifted_hyper: bool
    image_layout: Literal["paired", "reading"]
    renderer: str
    tag_space: str
    calls_tag: str
    special_tokens: Mapping[int, str]
    markov_head: tuple[str, str]
    presets: tuple[str, ...]


V4 = Family(
    name="deepseek_v4",
    short_name="v4",
    title="DeepSeek-V4",
    q_head_norm=True,
    shifted_hyper=False,
    image_layout="paired",
    renderer="DeepseekV4Encoding",
    tag_space="",
    calls_tag="tool_calls",
    special_tokens={},
    markov_head=("markov_w1", "markov_w2"),
    presets=("tiny", "mini", "flash-4layer", "flash-8layer", "flash-vision"),
)
V41 = Family(
    name="deepseek_v41",
    short_name="v41",
    title="DeepSeek-V4.1",
    q_head_norm=False,
    shifted_hyper=True,
    image_layout="reading",
    renderer="DeepseekV41Encoding",
    tag_space=" ",
    calls_tag="calls",
    special_tokens={128799: "<｜System｜>"},  # spec v41 10.1
    markov_head=("embed", "head"),
    presets=("tiny-v41", "mini-v41", "v41-flash"),
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in (V4, V41)}
