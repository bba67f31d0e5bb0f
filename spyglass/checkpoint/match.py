"""What a checkpoint has against what a model wants, from headers alone: the check behind `load` and `spyglass check`.

Every tensor ends in exactly one list. Nothing is skipped silently: draft stages and an unwanted tower are named;
everything else that does not fit is a fault. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from spyglass.checkpoint.safetensors import Checkpoint, TensorHeader, list_names
from spyglass.errors import CheckpointError
from spyglass.params.hf_names import StackedPart, from_stacked, to_native
from spyglass.params.shard import Shard
from spyglass.params.table import TABLE_ROWS, Param, component_of
from spyglass.quant.formats import BF16, F32, FP4, I64, Format, fp8

Part = Literal["text", "vision", "draft", "engram"]
PARTS: tuple[Part, ...] = ("text", "vision", "draft", "engram")
SQUARE_BLOCKS = (128, 32)
MAX_STACKED_EXPERTS = 4096
_PLAIN = {"BF16": BF16, "F32": F32}
_PACKED = ("F8_E4M3", "I8", "U8")
_E8M0 = ("F8_E8M0", "U8")


class Wanted(Protocol):
    """What a model wants of one entry: `params.table.Param` and `quant.packed.WeightSlot` both say it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def kind(self) -> str: ...
    @property
    def optional(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Source:
    """Where an entry's bytes lie and how they are to be read."""

    format: Format
    weight: TensorHeader
    scale: TensorHeader | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.scale.nbytes if self.scale is not None else 0)

    def held(self, name: str, param: Param, shard: Shard) -> Source:
        """The bytes of that part of entry `name` which one of several processes has.

        Raises:
            ConfigError: its format cannot be cut there.
        """
        weight, *scales = shard.stored_cuts(name, param, self.format)
        scale = None if self.scale is None else self.scale.narrow(scales[0])
        return Source(self.format, self.weight.narrow(weight), scale)


@dataclass(frozen=True, slots=True)
class Match:
    """The outcome. Names are native; `left_over` names are as found on disk.

    `at_init`: optional entries the checkpoint lacks. `skipped`: tensors left unread on purpose, by part.
    `wants_vision`: the model has a tower.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    at_init: list[str] = field(default_factory=list)
    skipped: dict[Part, list[str]] = field(default_factory=lambda: {part: [] for part in PARTS})
    missing: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    wants_vision: bool = True

    def faults(self) -> list[str]:
        """One line per kind of fault, each listing names; empty when the checkpoint fits."""
        whole = any(map(_in_tower, self.missing)) and not any(map(_in_tower, self.sources))
        stripped = _of_tower(self.missing) if whole else []
        without = [] if self.wants_vision else _of_tower(map(to_native, self.left_over))
        kinds = (
            (
                "missing is the whole vision tower, which config.json describes; fetch the whole checkpoint, or load "
                "it without images (--images 0)",
                stripped,
                "tensors",
            ),
            ("missing", [name for name in self.missing if name not in stripped], "tensors"),
            (
                "left over from a vision model, while config.json describes no tower; take the config.json of these "
                "files, or load them without images (--images 0)",
                without,
                "tensors",
            ),
            (
                "left over",
                [] if without == self.left_over else self.left_over,
                "tensors that the model has no place for",
            ),
            ("misshapen", self.misshapen, "tensors"),
            ("mixed", self.mixed, "expert matrices that differ in format from the first of their layer"),
        )
        return [f"{word} ({len(names)} {what}): {list_names(names)}" for word, names, what in kinds if names]

    def refuse_faults(self, where: object) -> None:
        """Raise unless everything fits.

        Raises:
            CheckpointError: lists missing, left-over and misshapen tensors, the first twenty of each and their number.
        """
        faults = self.faults()
        if faults:
            raise CheckpointError(f"{where} does not hold what its configuration promises:\n  " + "\n  ".join(faults))


def _of_tower(names: Iterable[str]) -> list[str]:
    """Those of native names that only a model with a vision tower has."""
    return [name for name in names if _in_tower(name) or name.endswith(".ffn.gate.bias_vl")]


def _in_tower(name: str) -> bool:
    return part_of(name) == "vision"


def part_of(name: str) -> Part:
    """Which of the counted parts a native name belongs to; engram tables are a part of their own."""
    group = component_of(name)
    return group if group in ("text", "draft", "engram") else "vision"


def match(
    checkpoint: Checkpoint, wanted: Mapping[str, Wanted], *, skip: frozenset[Part] = frozenset({"draft"})
) -> Match:
    """Find every wanted entry and account for every tensor of the checkpoint.

    `skip`: parts that are left unread; with "vision" that includes the tower's router biases of the text layers.
    """
    result = Match(wants_vision=any(part_of(name) == "vision" for name in wanted))
    found = native_tensors(checkpoint)
    for name, entry in wanted.items():
        if part_of(name) in skip:
            continue
        _take(name, entry, found, result)
    for name, header in found.items():
        part = _skipped_part(name, found, skip)
        if part is not None:
            result.skipped[part].append(name)
        elif name.endswith(".scale"):
            result.left_over.append(f"{header.name} (a scale without an FP8 or FP4 weight)")
        else:
            result.left_over.append(header.name)
    result.mixed.extend(_mixed_experts(result.sources))
    result.left_over[:] = dict.fromkeys(result.left_over)
    return result


def _mixed_experts(sources: Mapping[str, Source]) -> list[str]:
    """Expert matrices whose format differs from their layer's first: experts are stacked, a stack has one format."""
    first: dict[str, Format] = {}
    mixed = []
    for name, source in sources.items():
        layer, experts, _ = name.partition(".ffn.experts.")
        if experts and first.setdefault(layer, source.format) != source.format:
            mixed.append(f"{name} is {source.format}, the layer's first is {first[layer]}")
    return mixed


def native_tensors(checkpoint: Checkpoint) -> dict[str, TensorHeader]:
    """Headers by native tensor name; stacked experts become one header per expert matrix, each with its own bytes.

    Raises:
        CheckpointError: two tensors of the checkpoint mean the same native tensor.
    """
    result: dict[str, TensorHeader] = {}
    twice = []
    for header in checkpoint.tensors.values():
        for name, part in _native_parts(header):
            if name in result:
                twice.append(f"{result[name].name} and {header.name}")
            result[name] = part
    if twice:
        raise CheckpointError(f"{checkpoint.directory}: two names for one tensor: {list_names(twice)}")
    return result


def _native_parts(header: TensorHeader) -> list[tuple[str, TensorHeader]]:
    if "experts" in header.name and len(header.shape) == 3 and 0 < header.shape[0] <= MAX_STACKED_EXPERTS:
        parts = from_stacked(header.name, header.shape[0])
        if parts and header.shape[1] % parts[0][1].parts == 0:
            return [(name, _cut(header, part)) for name, part in parts]
    return [(to_native(header.name), header)]


def _cut(header: TensorHeader, part: StackedPart) -> TensorHeader:
    """The bytes of one expert's rows in a stacked tensor: contiguous, since rows follow one another."""
    experts, rows, columns = header.shape
    nbytes = header.nbytes // (experts * part.parts)
    start = header.start + nbytes * (part.expert * part.parts + part.part)
    return TensorHeader(header.name, header.dtype, (rows // part.parts, columns), header.file, start, nbytes)


def _take(name: str, entry: Wanted, found: dict[str, TensorHeader], result: Match) -> None:
    """Move one entry's tensors from `found` into the result."""
    packable = entry.kind in ("matrix", "table")
    weight_name = f"{name}.weight" if packable else name
    weight = found.pop(weight_name, None)
    if weight is None:
        (result.at_init if entry.optional else result.missing).append(weight_name)
        return
    scale = None
    if packable and weight.dtype in _PACKED:
        scale = found.pop(f"{name}.scale", None)
        if scale is None:
            result.missing.append(f"{name}.scale")
            return
    format = _plain_format(entry, weight) if scale is None else _packed_format(entry, weight, scale)
    if isinstance(format, str):
        result.misshapen.append(f"{weight_name} is {_describe(weight)}, expected {format}")
    else:
        result.sources[name] = Source(format, weight, scale)


def _plain_format(entry: Wanted, weight: TensorHeader) -> Format | str:
    """The format of a tensor without scale, or what was expected instead."""
    formats = {"I64": I64} if entry.kind == "index" else _PLAIN
    if weight.dtype in formats and weight.shape == entry.shape:
        return formats[weight.dtype]
    packed = {"matrix": ", or F8_E4M3 or packed FP4 with scales", "table": ", or F8_E4M3 with scales"}.get(
        entry.kind, ""
    )
    return f"{list(entry.shape)} in {' or '.join(formats)}{packed}"


def _packed_format(entry: Wanted, weight: TensorHeader, scale: TensorHeader) -> Format | str:
    """The format by dtype and scale shape, or what was expected instead."""
    shape = entry.shape
    if entry.kind == "table":
        formats, known = [TABLE_ROWS], weight.dtype == "F8_E4M3" and scale.dtype in _E8M0
    elif weight.dtype == "F8_E4M3":
        formats = [fp8((block, block), "F32" if scale.dtype == "F32" else "F8_E8M0") for block in SQUARE_BLOCKS]
        known = scale.dtype in (*_E8M0, "F32")
    else:
        formats, known = [FP4], scale.dtype in _E8M0 and shape[-1] % 2 == 0
    if weight.shape != formats[0].storage_shape(shape):
        return f"{list(formats[0].storage_shape(shape))} for {list(shape)} values"
    for format in formats:
        if known and format.scale_shape(shape) == scale.shape:
            return format
    shapes = " or ".join(str(list(format.scale_shape(shape) or ())) for format in formats)
    return f"a scale of F8_E8M0 {shapes} beside it, found {_describe(scale)}"


def _describe(header: TensorHeader) -> str:
    return f"{header.dtype} {list(header.shape)}"


def _skipped_part(name: str, found: Mapping[str, TensorHeader], skip: frozenset[Part]) -> Part | None:
    """The part under which an untaken tensor is skipped; None = it is left over."""
    part = part_of(name)
    if part in skip:
        return part
    if "vision" in skip and name.startswith("layers.") and name.endswith(".ffn.gate.bias_vl"):
        return "vision"
    return None
