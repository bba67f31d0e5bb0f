"""Native checkpoint names to those of Hugging Face Transformers and back (spec v4 2.2, 2.3), from `declared`.

Modules map one to one; the experts have a second spelling in which Transformers stacks all of them into two tensors:
`gate_up_proj` [E, 2F, C] (w1 rows first, then w3) and `down_proj` [E, C, F]. Whole names are looked up, never suffixes:
`head.weight` is also the end of `markov_head.head.weight`, and `.w1` occurs in experts, aligner and tower alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spyglass.params import declared
from spyglass.params.declared import MODEL, TOWER, Declared


def _modules(section: Iterable[Declared]) -> dict[str, str]:
    """Native to Transformers name of each module and plain tensor that has one of its own there."""
    return {
        one.name.removesuffix(".weight"): one.hf_name.removesuffix(".weight")
        for one in section
        if one.hf_name != one.name
    }


TOP_LEVEL = _modules(MODEL) | {name: hf for name, hf in _modules(TOWER).items() if name.startswith("image_")}
LAYER = _modules(declared.LAYER)
EXPERT = _modules(declared.EXPERT)
STACKED = {"w1": ("gate_up_proj", 0, 2), "w3": ("gate_up_proj", 1, 2), "w2": ("down_proj", 0, 1)}
SUFFIXES = {".weight": ".weight", ".scale": ".weight_scale_inv"}
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "language_model.")
_UNTABLED = ("vision.", "aligner.")
_PARTS = {"self_attn": "attn", "mlp": "ffn"}
_BIAS = "gate.e_score_correction_bias"
_NATIVE_PARTS, _FOREIGN_ENDS = ("ffn.", "attn."), (".weight_scale_inv", _BIAS)

_TOP_LEVEL_BACK = {hf.removeprefix("model."): native for native, hf in TOP_LEVEL.items()}
_LAYER_BACK = {hf: native for native, hf in LAYER.items()}
_EXPERT_BACK = {hf: native for native, hf in EXPERT.items()}
_SUFFIXES_BACK = {hf: native for native, hf in SUFFIXES.items()}


@dataclass(frozen=True, slots=True)
class StackedPart:
    """Where an expert's tensor lies inside a stacked one: rows `part` of `parts` equal row blocks of entry `expert`."""

    name: str
    expert: int
    part: int
    parts: int


def to_hf(name: str) -> str:
    """Transformers name of a native tensor or module name, experts one by one; names outside the table stay."""
    if name.startswith(_UNTABLED):
        return f"model.{name}"
    group, index, rest = _split_layer(name)
    if not index:
        return _translate(name, TOP_LEVEL, SUFFIXES) or name
    if rest.startswith("ffn.experts."):
        expert, _, tail = rest.removeprefix("ffn.experts.").partition(".")
        translated = _translate(tail, EXPERT, SUFFIXES)
        return f"model.{group}.{index}.mlp.experts.{expert}.{translated}" if translated else name
    return f"model.{group}.{index}.{_translate(rest, LAYER, SUFFIXES) or rest}"


def to_native(name: str) -> str:
    """Native name of a Transformers tensor or module name; native names and unknown names stay as they are."""
    bare = next((name[len(prefix) :] for prefix in PREFIXES if name.startswith(prefix)), name)
    group, index, rest = _split_layer(bare)
    if rest.startswith(_NATIVE_PARTS) and not rest.endswith(_FOREIGN_ENDS):
        return bare  # by far the most names of an official checkpoint
    if not index:
        return _translate(bare, _TOP_LEVEL_BACK, _SUFFIXES_BACK) or bare
    if rest.startswith("mlp.experts."):
        expert, _, tail = rest.removeprefix("mlp.experts.").partition(".")
        translated = _translate(tail, _EXPERT_BACK, _SUFFIXES_BACK)
        if translated and expert.isdecimal():
            return f"{group}.{index}.ffn.experts.{expert}.{translated}"
    return f"{group}.{index}.{_translate(rest, _LAYER_BACK, _SUFFIXES_BACK) or _half_translated(rest)}"


def _half_translated(rest: str) -> str:
    """Spellings between both, which the release's own converter reads as well (spec v41 2.2): `self_attn.wq_a`, ..."""
    part, dot, name = rest.partition(".")
    name = name.removesuffix(_BIAS) + "gate.bias" if name.endswith(_BIAS) else name
    for spelling, native in _SUFFIXES_BACK.items():
        if spelling != native and name.endswith(spelling):
            name = name.removesuffix(spelling) + native
    return f"{_PARTS.get(part, part)}{dot}{name}"


def to_stacked(name: str) -> StackedPart | None:
    """Place of a native expert tensor in the stacked spelling; None for every other tensor."""
    group, index, rest = _split_layer(name)
    if not index or not rest.startswith("ffn.experts."):
        return None
    expert, _, tail = rest.removeprefix("ffn.experts.").partition(".")
    matrix, _, suffix = tail.partition(".")
    if matrix not in STACKED or suffix not in ("weight", "scale"):
        return None
    stacked, part, parts = STACKED[matrix]
    ending = "_scale_inv" if suffix == "scale" else ""
    return StackedPart(f"model.{group}.{index}.mlp.experts.{stacked}{ending}", int(expert), part, parts)


def from_stacked(name: str, num_experts: int) -> list[tuple[str, StackedPart]]:
    """Native names of the parts of a stacked tensor, expert by expert; empty when the name is not one of a stack."""
    bare = next((name[len(prefix) :] for prefix in PREFIXES if name.startswith(prefix)), name)
    group, index, rest = _split_layer(bare)
    if not index or not rest.startswith("mlp.experts."):
        return []
    stacked = rest.removeprefix("mlp.experts.")
    suffix = "scale" if stacked.endswith("_scale_inv") else "weight"
    stacked = stacked.removesuffix("_scale_inv")
    parts = sorted((part, matrix, parts) for matrix, (stack, part, parts) in STACKED.items() if stack == stacked)
    return [
        (f"{group}.{index}.ffn.experts.{expert}.{matrix}.{suffix}", StackedPart(name, expert, part, count))
        for expert in range(num_experts)
        for part, matrix, count in parts
    ]


def _split_layer(name: str) -> tuple[str, str, str]:
    """`layers.3.rest` to ("layers", "3", "rest"), the same for `mtp.`; empty strings for names outside a layer."""
    group, _, tail = name.partition(".")
    index, _, rest = tail.partition(".")
    return (group, index, rest) if group in ("layers", "mtp") and index.isdecimal() and rest else ("", "", "")


def _translate(name: str, table: dict[str, str], suffixes: dict[str, str]) -> str | None:
    """Look a name up as it is (modules, plain tensors), then without its suffix."""
    if name in table:
        return table[name]
    for suffix, translated in suffixes.items():
        base = name.removesuffix(suffix)
        if base != name and base in table:
            return table[base] + translated
    return None
