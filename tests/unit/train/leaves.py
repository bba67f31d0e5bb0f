"""Models whose every weight can be a leaf, and arithmetic in which fp32 is wide: what gradients are checked with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from spyglass.engram.feed import EngramFeed
from spyglass.layers.embedding import Embedding, PlainTensor
from spyglass.layers.linear import Experts, GroupedLinear, Linear
from spyglass.layers.norm import RMSNorm
from spyglass.model import VisionLanguageModel
from spyglass.ops.declare import Ops
from spyglass.ops.fake_quant.reference import quantise
from spyglass.ops.table import bind_ops
from spyglass.quant.codec import decode
from spyglass.quant.formats import F32, FakeQuant
from spyglass.quant.packed import Packed
from spyglass.train.packing import PackedStep, Sample, pack
from tests import small_v41
from tests.small_models import build_model, empty_model, random_weights, small_config, small_model

FAMILIES = ("v4", "v41")
FLOAT32, TO_FLOAT32 = torch.float32, torch.Tensor.float
STEPS = (1e-7, 1e-6, 3e-8, 1e-5, 1e-8)


@contextmanager
def wide() -> Iterator[None]:
    """Whatever asks for float32 gets float64, so that finite differences are exact enough to judge a gradient."""
    before = torch.float32, torch.Tensor.float
    torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.float32, torch.Tensor.float = before  # type: ignore[method-assign]


def narrow_quantise(x: torch.Tensor, spec: FakeQuant) -> torch.Tensor:
    """What rounding does to blocks, in float32 also inside `wide`: scales are made from its bits."""
    before = torch.float32, torch.Tensor.float
    torch.float32, torch.Tensor.float = FLOAT32, TO_FLOAT32  # type: ignore[method-assign]
    try:
        return quantise(x.to(FLOAT32), spec)
    finally:
        torch.float32, torch.Tensor.float = before  # type: ignore[method-assign]


class Frozen:
    """Choices of the first run, made again in every later one: a step of finite differences must not change them.

    So with what rounding adds: x + (round(x₀) - x₀), x₀ of the first run, is what straight-through gradients are the
    slope of. Inside `wide`, rounding takes `narrow_quantise`.
    """

    def __init__(self) -> None:
        plain = bind_ops("cpu", "float32", "training")
        self._router = plain.router_topk
        self._fake_quant, self._row_finish, self._cache_write = plain.fake_quant, plain.row_finish, plain.cache_write
        self._made: list[torch.Tensor] = []
        self._next = 0
        self.ops: Ops = plain.replaced(
            index_topk=self._remembering(plain.index_topk),
            index_blocks=self._remembering(plain.index_blocks),
            router_topk=self._route,
            fake_quant=self.round_to,
            row_finish=self._finish,
        )

    def start(self) -> None:
        """Begin another run."""
        self._next = 0

    def _again(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._next == len(self._made):
            self._made.append(make())
        self._next += 1
        return self._made[self._next - 1]

    def _remembering(self, op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **options: self._again(lambda: op(*args, **options))

    def round_to(self, x: torch.Tensor, spec: FakeQuant, **options: Any) -> torch.Tensor:
        """The op `fake_quant` in the first run, afterwards what it added then."""
        first = self._next == len(self._made)
        out: torch.Tensor = self._fake_quant(x, spec, **options) if first else x
        added = self._again(lambda: out.detach() - x.detach())
        return out if first else x + added

    def _finish(
        self,
        x: torch.Tensor,
        *tables: torch.Tensor,
        quant: FakeQuant | None = None,
        dims: int | None = None,
        tail_bf16: bool = False,
        pages_NBD: torch.Tensor | None = None,
        write_T: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """The op `row_finish`, rounding as above."""
        rows: torch.Tensor = self._row_finish(x, *tables, **options)
        if quant is not None:
            rows = self.round_to(rows, quant, dims=dims, tail_bf16=tail_bf16)
        if pages_NBD is not None:
            self._cache_write(pages_NBD, rows, write_T)
        return rows

    def _route(self, x: torch.Tensor, weight: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self._again(lambda: self._router(x, weight, **options)[0])
        out: tuple[torch.Tensor, torch.Tensor] = self._router(
            x, weight, k=options["k"], scale=options["scale"], bias_E=None, forced_TK=ids
        )
        return out


@contextmanager
def frozen_rounding(frozen: Frozen) -> Iterator[None]:
    """Inputs of linear maps and of experts, too, are rounded as `frozen` does it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spyglass.ops.fake_quant.reference.quantise", narrow_quantise)
        for op in ("linear_block", "experts_grouped"):
            patch.setattr(f"spyglass.ops.{op}.training.fake_quant", frozen.round_to)
        yield


def family(name: str, **options: Any) -> VisionLanguageModel:
    """A small model with training ops; `options` as `small_models.build_model`."""
    options = {"ops": bind_ops("cpu", "float32", "training"), "dtype": torch.float32, **options}
    if name == "v41":
        model = small_v41.small_v41_model(config=small_v41.small_v41_config(), **options)
    else:
        model = small_model(config=small_config(vision_max_n_token=40), **options)
    assert isinstance(model, VisionLanguageModel)
    return model


def rounded_family(name: str, frozen: Frozen) -> VisionLanguageModel:
    """A small model that rounds as released, for runs inside `wide`: its packed weights decoded before."""
    config = small_v41.small_v41_config() if name == "v41" else small_config(vision_max_n_token=40)
    weights = random_weights(empty_model(config).slots(), 0, True)
    with wide():
        model = build_model(config, weights, ops=frozen.ops, dtype=torch.float32, numerics="reference", expand=False)
    weight_leaves(model)
    return model


def feed_of(name: str, dtype: torch.dtype = torch.float32) -> EngramFeed | None:
    """What fetches the memory rows of a family's model."""
    if name != "v41":
        return None
    store = small_v41.small_store(small_v41.small_v41_config())
    return EngramFeed(store, device=torch.device("cpu"), dtype=dtype)


def wide_step(
    samples: Sequence[Sample], model: VisionLanguageModel, feed: EngramFeed | None, adapter_id: int
) -> PackedStep:
    """A packed step inside `wide`, memory rows included."""
    step = pack(samples, model.config, dtype=torch.float32, adapter_id=adapter_id, engram=feed)
    rows = {layer: row.double() for layer, row in step.batch.engram_rows.items()}
    return replace(step, batch=replace(step.batch, engram_rows=rows))


def weight_leaves(model: VisionLanguageModel) -> dict[str, torch.Tensor]:
    """Every weight that the loss depends on smoothly, as a float64 leaf in its place, by checkpoint name."""
    leaves: dict[str, torch.Tensor] = {}

    def leaf(name: str, tensor: torch.Tensor) -> torch.Tensor:
        leaves[name] = tensor.double().requires_grad_()
        return leaves[name]

    def plain(name: str, weight: Packed) -> Packed:
        return replace(weight, format=F32, data=leaf(name, decode(weight, torch.float32)), scale=None)

    for module in model.modules():
        if isinstance(module, Linear | GroupedLinear):
            assert module.weight is not None
            module.weight = plain(module.name, module.weight)
            if isinstance(module, Linear) and module.bias_O is not None:
                module.bias_O = leaf(f"{module.name}.bias", module.bias_O)
        elif isinstance(module, Experts):
            module.stacks = {key: plain(f"{module.name}.{key}", stack) for key, stack in module.stacks.items()}
        elif isinstance(module, RMSNorm):
            assert module.weight_D is not None
            module.weight_D = leaf(module.name, module.weight_D)
        elif isinstance(module, Embedding):
            assert module.weight_VC is not None
            module.weight_VC = leaf(module.name, module.weight_VC)
        elif isinstance(module, PlainTensor) and module.tensor().is_floating_point():
            module.value = leaf(module.name, module.tensor())
    return leaves


def kind_of(name: str) -> str:
    """A name without its layer's number: what all layers have in common."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


def check_directions(loss: Callable[[], torch.Tensor], leaves: Mapping[str, torch.Tensor], bound: float) -> None:
    """Gradients are slopes: along a random direction through all leaves of a kind, (loss(+h) - loss(-h)) / 2h is the
    derivative, but for `bound` times the size of the gradient.

    A clamp or a root near 0 may lie within a step and spoil it; a wrong gradient is wrong for every size of step.
    """
    found = torch.autograd.grad(loss(), list(leaves.values()), allow_unused=True)
    grads = {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None and grad.any()}
    assert grads.keys() == leaves.keys(), f"no gradient reaches {sorted(leaves.keys() - grads.keys())}"
    generator = torch.Generator().manual_seed(7)
    kinds: dict[str, list[str]] = {}
    for name in leaves:
        kinds.setdefault(kind_of(name), []).append(name)
    for kind, names in kinds.items():
        ways = {name: torch.randn(leaves[name].shape, generator=generator, dtype=torch.float64) for name in names}
        expected = sum(float((grads[name] * way).sum()) for name, way in ways.items())
        size = sum(float(grads[name].norm()) for name in names)
        errors = []
        for step in STEPS:
            slope = (_loss_at(loss, leaves, ways, step) - _loss_at(loss, leaves, ways, -step)) / (2 * step)
            errors.append(abs(slope - expected) / size)
            if errors[-1] < bound:
                break
        assert min(errors) < bound, f"{kind}: slope {slope}, derivative {expected}, errors {errors}"


@torch.no_grad()
def _loss_at(
    loss: Callable[[], torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
    ways: Mapping[str, torch.Tensor],
    step: float,
) -> float:
    before = {name: leaves[name].clone() for name in ways}
    for name, way in ways.items():
        leaves[name] += step * way
    value = float(loss())
    for name, tensor in before.items():
        leaves[name].copy_(tensor)
    return value
