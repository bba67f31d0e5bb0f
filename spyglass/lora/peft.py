"""PEFT folders in: every tensor becomes part of a pair of a native module, or the adapter is refused by name.

Names may be official or Transformers', below any of the prefixes that trainers leave. A pair for stacked experts
holds all experts of a layer, in one of the layouts of `stacks`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from spyglass.checkpoint.match import MAX_STACKED_EXPERTS
from spyglass.checkpoint.safetensors import MAX_NAMES_SHOWN, MAX_TENSORS, TensorHeader, list_names, read_header
from spyglass.config.model import ModelConfig
from spyglass.errors import AdapterError, CheckpointError
from spyglass.lora.config import AdapterConfig, read_adapter_config
from spyglass.lora.fit import PairShape, check_shapes_fit
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.lora.stacks import LAYOUTS, PARAMETERS, StackDims, named_stack, stack_dims, stack_factors
from spyglass.params.hf_names import to_native
from spyglass.params.table import most_tensors, param_table
from spyglass.params.targets import group_of, nearest_target, why_refused

TENSORS_NAME = "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?!bias)[^.]+)?(?:\.weight)?")
_STACK = re.compile(r"layers\.[0-9]{1,6}\.ffn\.experts")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Two tensors of one module. `module` as in the file; `parameter` the stacked tensor it belongs to, if it does."""

    module: str
    native: str
    parameter: str | None
    a: TensorHeader
    b: TensorHeader

    @property
    def name(self) -> str:
        """What ranks and alphas are looked up by."""
        named = self.parameter is None or self.module.endswith(f".{self.parameter}")
        return self.module if named else f"{_outer(self.module)}.{self.parameter}"

    def dims(self, rank: int) -> StackDims:
        """Of a pair for all experts, whose shapes have been checked."""
        assert self.parameter is not None
        found = stack_dims(self.a.shape, self.b.shape, rank, self.parameter)
        assert found is not None, self.name
        return found


@dataclass(slots=True)
class _Found:
    """Tensors of the file by module: the sides found so far."""

    sides: dict[str, dict[str, TensorHeader]] = field(default_factory=dict)
    strangers: list[str] = field(default_factory=list)


def read_adapter(directory: str | Path, model: ModelConfig | None = None) -> AdapterFile:
    """Read a PEFT folder (`adapter_config.json`, `adapter_model.safetensors`), for a `model` if it is known.

    Everything that headers can tell is checked before memory is taken for values.

    Raises:
        AdapterError: the folder is no adapter, is damaged, asks for something that is not implemented, has tensors
            that belong to no module which takes an adapter ("k of N modules matched"), or does not fit the model.
    """
    directory = Path(directory)
    config = read_adapter_config(directory)
    path = directory / TENSORS_NAME
    if not path.is_file():
        raise AdapterError(f"{directory} has no {TENSORS_NAME}; adapters in other files (.bin) are not read")
    try:
        headers = read_header(path, MAX_TENSORS if model is None else most_tensors(model))
    except CheckpointError as error:
        raise AdapterError(str(error)) from error
    pairs = _pairs(path, headers, config)
    for pair in pairs:
        _check_shapes(path, pair, config)
    if model is not None:
        _check_model(pairs, config, model)
    modules: dict[str, LowRank] = {}
    stacked: dict[str, int] = {}
    for pair in pairs:
        rank, alpha = config.rank_of(pair.name), config.alpha_of(pair.name)
        if pair.parameter is not None:
            stacked[pair.native] = pair.dims(rank).experts
        for name, a_rI, b_Or in _parts(pair, _read(pair.a), _read(pair.b), rank):
            if name in modules:
                raise AdapterError(f"{path} holds two pairs for one module: {name}, the second from {pair.module}")
            modules[name] = LowRank(a_RI=a_rI, b_OR=b_Or, alpha=alpha, rslora=config.rslora)
    return AdapterFile(modules=modules, stacked=stacked)


def _pairs(path: Path, headers: Mapping[str, TensorHeader], config: AdapterConfig) -> list[_Pair]:
    """Every tensor in a pair, every pair at a module that takes an adapter."""
    found = _sort(headers)
    if found.strangers:
        raise AdapterError(
            f"{path} holds tensors that are no lora_A or lora_B weight (DoRA, biases, embeddings or whole modules?): "
            f"{list_names(found.strangers)}; {LAYOUTS}"
        )
    if not found.sides:
        raise AdapterError(f"{path} holds no tensor: 0 of 0 modules matched")
    halves = [f"{module} without lora_{'B' if 'A' in s else 'A'}" for module, s in found.sides.items() if len(s) < 2]
    if halves:
        raise AdapterError(f"{path} holds halves of pairs: {list_names(halves)}")
    pairs: list[_Pair] = []
    unmatched: list[str] = []
    for module, sides in found.sides.items():
        native, parameter = _target_of(module, found.sides, config)
        if parameter is None and group_of(native) is None:
            reason = why_refused(native)
            if reason is None and len(unmatched) < MAX_NAMES_SHOWN and (near := nearest_target(native)) is not None:
                reason = f"nearest is {near}"
            unmatched.append(f"{module} ({reason})" if reason else module)
        pairs.append(_Pair(module=module, native=native, parameter=parameter, a=sides["A"], b=sides["B"]))
    if unmatched:
        raise AdapterError(
            f"{path}: {len(pairs) - len(unmatched)} of {len(pairs)} modules matched, and an adapter is used wholly or "
            f"not at all; unmatched: {list_names(unmatched)}; {LAYOUTS}"
        )
    return pairs


def _sort(headers: Mapping[str, TensorHeader]) -> _Found:
    found = _Found()
    for name, header in headers.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match["side"] in found.sides.get(match["module"], {}):
            found.strangers.append(name)
        else:
            found.sides.setdefault(match["module"], {})[match["side"]] = header
    return found


def _target_of(module: str, modules: Mapping[str, object], config: AdapterConfig) -> tuple[str, str | None]:
    """The native module, and for stacked experts their layer and which of the two stacked tensors it is.

    PEFT nests the pairs of one module: `gate_up_proj` lies inside (`.base_layer`) where both have one.
    """
    outer = _outer(module)
    native = to_native(outer)
    if module == outer and (named := named_stack(native)) is not None:
        return named
    if not _STACK.fullmatch(native):
        return to_native(module), None
    if module != outer:
        return native, "gate_up_proj"
    if f"{outer}.base_layer" in modules:
        return native, "down_proj"
    targets = tuple(f".{target}" for target in config.target_parameters)
    asked = [name for name in ("gate_up_proj", "down_proj") if f".{outer}.{name}".endswith(targets)]
    if len(asked) != 1:
        raise AdapterError(
            f"{module} holds one pair for stacked experts, and target_parameters {list(config.target_parameters)} name "
            f"{len(asked)} of gate_up_proj and down_proj there; they must say which one it is"
        )
    return native, asked[0]


def _outer(module: str) -> str:
    return module.removesuffix(".base_layer")


def _check_shapes(path: Path, pair: _Pair, config: AdapterConfig) -> None:
    """Ranks of both tensors and of the config agree; whether they fit the model is seen when they are attached."""
    for header in (pair.a, pair.b):
        axes = (2,) if pair.parameter is None else (2, 3)
        if header.dtype not in _DTYPES or len(header.shape) not in axes or 0 in header.shape:
            raise AdapterError(
                f"{path}: {header.name} is {header.dtype} {list(header.shape)}; expected a matrix of "
                f"{', '.join(_DTYPES)}; {LAYOUTS}"
            )
    rank, rows, columns = config.rank_of(pair.name), pair.a.shape[0], pair.b.shape[1]
    if pair.parameter is not None:
        dims = stack_dims(pair.a.shape, pair.b.shape, rank, pair.parameter)
        sound = dims is not None
        if dims is not None and dims.experts > MAX_STACKED_EXPERTS:
            raise AdapterError(
                f"{path}: {pair.name} has {dims.experts:,} experts of rank {rank}; a model has "
                f"{MAX_STACKED_EXPERTS:,} at most"
            )
    else:
        own_for_each_group = pair.native.endswith(".wo_a") and rows % rank == 0
        sound = columns == rank and (rows == rank or own_for_each_group)
    if not sound:
        raise AdapterError(
            f"{path}: {pair.name} has A {list(pair.a.shape)} and B {list(pair.b.shape)}, which is not the rank {rank} "
            f"that adapter_config.json gives it (r, rank_pattern){'' if pair.parameter is None else f'; {LAYOUTS}'}"
        )


def _check_model(pairs: list[_Pair], config: AdapterConfig, model: ModelConfig) -> None:
    """Raises AdapterError: by its headers the adapter is for another model."""
    shapes: dict[str, PairShape] = {}
    stacked: dict[str, int] = {}
    experts = model.text.n_routed_experts
    for pair in pairs:
        rank = config.rank_of(pair.name)
        if pair.parameter is None:
            shapes[pair.native] = (pair.a.shape[0], pair.a.shape[1]), (pair.b.shape[0], rank)
            continue
        dims, matrices = pair.dims(rank), PARAMETERS[pair.parameter]
        stacked[pair.native] = dims.experts
        shape = (rank, dims.inner), (dims.outer // len(matrices), rank)
        shapes |= {f"{pair.native}.{expert}.{matrix}": shape for expert in range(experts) for matrix in matrices}
    check_shapes_fit(shapes, stacked, param_table(model), experts)


def _parts(pair: _Pair, a: torch.Tensor, b: torch.Tensor, rank: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(native module, A [r, in], B [out, r]) of a pair: one, or every expert and matrix of a stack, as views."""
    if pair.parameter is None:
        return [(pair.native, a, b)]
    experts, matrices = pair.dims(rank).experts, PARAMETERS[pair.parameter]
    a_ErI, b_EOr = stack_factors(a, b, rank, experts)
    return [
        (f"{pair.native}.{expert}.{matrix}", a_ErI[expert], b_EOr[expert].chunk(len(matrices))[part])
        for expert in range(experts)
        for part, matrix in enumerate(matrices)
    ]


def _read(header: TensorHeader) -> torch.Tensor:
    """A tensor of its own: the file may be overwritten or removed afterwards.

    Raises:
        AdapterError: the file cannot be read or has become shorter, or a value is not finite.
    """
    out = torch.empty(header.shape, dtype=_DTYPES[header.dtype])
    view = out.view(torch.uint8).numpy().reshape(-1).data
    try:
        with open(header.file, "rb") as stream:
            stream.seek(header.start)
            done = stream.readinto(view)
    except OSError as error:
        raise AdapterError(f"{header.file} cannot be read: {error.strerror}") from error
    if done != header.nbytes:
        raise AdapterError(f"{header.file} ended inside {header.name!r}; it was changed while being read")
    if not out.isfinite().all():
        raise AdapterError(f"{header.file}: {header.name} holds a value that is no finite number; the file is damaged")
    return out
