"""What an adapter may change, by native module name: groups for people, refusals with their reason. Torch-free.

Whole names are matched, never suffixes: `attn.wq_b` and `attn.indexer.wq_b` are different modules.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import get_args

from spyglass.errors import AdapterError
from spyglass.params.declared import EXPERT, LAYER, TOWER, TOWER_BLOCK, AdapterGroup

GROUPS: tuple[AdapterGroup, ...] = get_args(AdapterGroup)
VISION_GROUPS: tuple[AdapterGroup, ...] = ("tower", "aligner")
UNTRAINABLE: dict[str, str] = {
    "indexer": "the loss of the language model has no gradient there: the choice of rows is not differentiable",
    "engram": "its tables are hashed look-ups that stay frozen, and so does the gate that reads them",
}
_LAYER = r"layers\.[0-9]+\."
_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,5})(?=\.)")  # one spelling each: no two names mean one module
_LONGEST = 120  # of a name that is compared with others, which takes long for long ones
_SECTIONS = {"layers.*.": LAYER, "layers.*.ffn.experts.*.": EXPERT, "": TOWER, "vision.blocks.*.": TOWER_BLOCK}
_TARGETS = {f"{prefix}{one.name}": one.adapter for prefix, section in _SECTIONS.items() for one in section}
_REFUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(_LAYER + r"ffn\.gate(\..*)?"), "routers take no adapter: which expert runs must stay what it is"),
    (re.compile(r"(embed|head)(\..*)?"), "embedding and head take no adapter"),
    (re.compile(r"mtp\..*"), "draft stages are not run, so an adapter there would do nothing"),
)


def group_of(name: str) -> AdapterGroup | None:
    """The group of a native module name, None for modules that take no adapter."""
    return None if "*" in name else _TARGETS.get(_NUMBER.sub("*", name))


def nearest_target(name: str) -> str | None:
    """The module that takes an adapter and is called most like a native name, with the name's own numbers."""
    if len(name) > _LONGEST:
        return None
    numbers = iter(_NUMBER.findall(name))
    found = difflib.get_close_matches(_NUMBER.sub("*", name), [t for t, group in _TARGETS.items() if group], 1, 0.5)
    return re.sub(r"\*", lambda _: next(numbers, "0"), found[0]) if found else None


def why_refused(name: str) -> str | None:
    """Why a module takes no adapter, where there is a reason to give."""
    return next((reason for pattern, reason in _REFUSED if pattern.fullmatch(name)), None)


def split_expert(name: str) -> tuple[str, int, str] | None:
    """`layers.3.ffn.experts.7.w1` to ("layers.3.ffn.experts", 7, "w1"); None for every other module."""
    if group_of(name) != "experts":
        return None
    experts, number, matrix = name.rsplit(".", 2)
    return experts, int(number), matrix


def count_groups(names: Iterable[str]) -> dict[AdapterGroup, int]:
    """Modules per group, in the order of `GROUPS`, groups without any left out."""
    counts = Counter(group_of(name) for name in names)
    return {group: counts[group] for group in GROUPS if counts[group]}


def describe_counts(counts: Mapping[AdapterGroup, int]) -> str:
    """`27 modules: text: attention 25; vision: aligner 2`: what people want to see when an adapter is loaded."""
    text = ", ".join(f"{group} {count}" for group, count in counts.items() if group not in VISION_GROUPS)
    seen = ", ".join(f"{group} {counts[group]}" for group in VISION_GROUPS if group in counts)
    total = sum(counts.values())
    return f"{total} {'module' if total == 1 else 'modules'}: text: {text or 'none'}; vision: {seen or 'none'}"


def check_targets(targets: Iterable[str]) -> tuple[AdapterGroup, ...]:
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
