"""What an adapter may change, by native module name: groups for people, refusals with their reason. Torch-free.

Whole names are matched, never suffixes: `attn.wq_b` and `attn.indexer.wq_b` are different modules.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from spyglass.errors import AdapterError

Group = Literal["attention", "compressor", "indexer", "shared", "experts", "engram", "tower", "aligner"]
GROUPS: tuple[Group, ...] = (
    "attention", "compressor", "indexer", "shared", "experts", "engram", "tower", "aligner",
)  # fmt: skip
VISION_GROUPS: tuple[Group, ...] = ("tower", "aligner")
UNTRAINABLE: dict[str, str] = {
    "indexer": "the loss of the language model has no gradient there: the choice of rows is not differentiable",
    "engram": "its tables are hashed look-ups that stay frozen, and so does the gate that reads them",
}
_INDEX = "(?:0|[1-9][0-9]{0,5})"  # one spelling each, so that no two tensors are meant for one module
_LAYER = rf"layers\.{_INDEX}\."
_PATTERNS: dict[Group, re.Pattern[str]] = {
    "attention": re.compile(_LAYER + r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b)"),
    "compressor": re.compile(_LAYER + r"attn\.compressor\.(wkv|wgate)"),
    "indexer": re.compile(_LAYER + r"attn\.indexer\.(wq_b|wk|weights_proj|compressor\.wkv|compressor\.wgate)"),
    "shared": re.compile(_LAYER + r"ffn\.shared_experts\.w[123]"),
    "experts": re.compile(_LAYER + rf"ffn\.experts\.{_INDEX}\.w[123]"),
    "engram": re.compile(_LAYER + r"engram\.wkv"),
    "tower": re.compile(rf"vision\.(patch_embed\.proj|blocks\.{_INDEX}\.(attn\.(wqkv|wo)|mlp\.(w1|w2)))"),
    "aligner": re.compile(r"aligner\.(w1|w2)"),
}
_REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(_LAYER + r"ffn\.gate(\..*)?"), "routers take no adapter: which expert runs must stay what it is"),
    (re.compile(r"(embed|head)(\..*)?"), "embedding and head take no adapter"),
    (re.compile(r"mtp\..*"), "draft stages are not run, so an adapter there would do nothing"),
)
_EXPERT = re.compile(rf"({_LAYER}ffn\.experts)\.({_INDEX})\.(w[123])")


def group_of(name: str) -> Group | None:
    """The group of a native module name, None for modules that take no adapter."""
    return next((group for group, pattern in _PATTERNS.items() if pattern.fullmatch(name)), None)


def why_refused(name: str) -> str | None:
    """Why a module takes no adapter, where there is a reason to give."""
    return next((reason for pattern, reason in _REFUSED if pattern.fullmatch(name)), None)


def split_expert(name: str) -> tuple[str, int, str] | None:
    """`layers.3.ffn.experts.7.w1` to ("layers.3.ffn.experts", 7, "w1"); None for every other module."""
    found = _EXPERT.fullmatch(name)
    return None if found is None else (found[1], int(found[2]), found[3])


def count_groups(names: Iterable[str]) -> dict[Group, int]:
    """Modules per group, in the order of `GROUPS`, groups without any left out."""
    counts = Counter(group_of(name) for name in names)
    return {group: counts[group] for group in GROUPS if counts[group]}


def describe_counts(counts: Mapping[Group, int]) -> str:
    """`27 modules: text: attention 25; vision: aligner 2`: what people want to see when an adapter is loaded."""
    text = ", ".join(f"{group} {count}" for group, count in counts.items() if group not in VISION_GROUPS)
    seen = ", ".join(f"{group} {counts[group]}" for group in VISION_GROUPS if group in counts)
    total = sum(counts.values())
    return f"{total} {'module' if total == 1 else 'modules'}: text: {text or 'none'}; vision: {seen or 'none'}"


def check_targets(targets: Iterable[str]) -> tuple[Group, ...]:
    """The groups that training may target, in the order of `GROUPS`.

    Raises:
        AdapterError: a name is no group, cannot be trained, or there is none.
    """
    asked = list(targets)
    for target in asked:
        if target in UNTRAINABLE:
            raise AdapterError(f"{target} cannot be trained: {UNTRAINABLE[target]}; leave it out of the targets")
        if target not in GROUPS:
            possible = ", ".join(group for group in GROUPS if group not in UNTRAINABLE)
            raise AdapterError(f"{target!r} is not a group of modules; the targets are {possible}")
    if not asked:
        raise AdapterError("no targets were given, so nothing would be trained; name at least one group of modules")
    return tuple(group for group in GROUPS if group in asked)
