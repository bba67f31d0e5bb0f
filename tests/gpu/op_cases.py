"""One call of every op, as inputs on the host: what a GPU is asked to compute as well.

Indices are in range, pages are shuffled, and every kind of absence occurs: padding rows, absent sources, picks that
name nothing, rows without experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16, FP4, FakeQuant, Format, fp8
from spyglass.quant.packed import Packed

ROWS = 37  # no multiple of anything a kernel tiles by
TABLE = torch.tensor([[3, 0, 5, 8], [6, 1, 7, 2]], dtype=torch.int32)
SEQUENCE = torch.tensor([0] * 20 + [1] * 17, dtype=torch.int32)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of an op. `exact`: the result has no rounding that may differ between machines."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    exact: bool = False
    written: int | None = None  # argument that the op changes in place: its result


class Source:
    """Seeded values of the activation dtype of a case."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(11)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator) * scale
        return values.to(self.dtype if dtype is None else dtype)

    def weight(self, *shape: int, format: Format = BF16) -> Packed:
        return encode(self.normal(*shape, dtype=torch.float32, scale=shape[-1] ** -0.5), format)

    def below(self, limit: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, limit, shape, generator=self.generator, dtype=torch.int32)


def linear_block(source: Source, format: Format) -> Call:
    rounding = FakeQuant(element="e4m3", block=128) if format.scale_dtype else None
    options = {
        "rounding": rounding,
        "addend_TO": source.normal(ROWS, 72, dtype=torch.float32),
        "bias_O": source.normal(72, dtype=torch.float32),
    }
    return Call(args=(source.normal(ROWS, 192), source.weight(72, 192, format=format)), options=options)


def linear_grouped(source: Source) -> Call:
    addend = source.normal(ROWS, 2, 40, dtype=torch.float32)
    return Call(args=(source.normal(ROWS, 2, 64), source.weight(80, 64)), options={"addend_TGO": addend})


def experts_grouped(source: Source, format: Format) -> Call:
    rounding = FakeQuant(element="e4m3", block=128) if format.scale_dtype else None
    ids = torch.stack([torch.randperm(5, generator=source.generator)[:2] for _ in range(ROWS)]).to(torch.int32)
    ids[-1] = -1
    weights = torch.rand(ROWS, 2, generator=source.generator)
    stacks = [source.weight(5, *shape, format=format) for shape in ((96, 64), (96, 64), (64, 96))]
    return Call(args=(source.normal(ROWS, 64), ids, weights, *stacks), options={"limit": 0.8, "rounding": rounding})


def lora_delta(source: Source, groups: int) -> Call:
    """Two adapters of ranks 3 and 4 in slots 2 and 5; some rows have none, some an adapter that owns nothing here."""
    slots = torch.tensor([0, 2, 5, 4], dtype=torch.int32)[source.below(4, ROWS).long()]
    owner = torch.tensor([2] * 3 + [5] * 4, dtype=torch.int32)
    scale = torch.rand(7, generator=source.generator)
    a, b = source.normal(7, 64, dtype=torch.float32), source.normal(7, groups, 40, dtype=torch.float32)
    return Call(args=(source.normal(ROWS, groups, 64, scale=0.1), slots, a, b, owner, scale), options={})


def router_topk(source: Source, *, pictures: bool, forced: bool, padding: bool = False) -> Call:
    options: dict[str, Any] = {"k": 3, "scale": 1.5, "bias_E": source.normal(9, dtype=torch.float32, scale=0.1)}
    if pictures:
        options["picture_T"] = torch.arange(ROWS) % 3 == 0
        options["bias_picture_E"] = source.normal(9, dtype=torch.float32, scale=0.1)
    if forced:
        options["forced_TK"] = torch.stack(
            [torch.randperm(9, generator=source.generator)[:3] for _ in range(ROWS)]
        ).long()
    if padding:
        options["positions_T"] = torch.arange(ROWS, dtype=torch.int32).masked_fill(torch.arange(ROWS) % 4 == 3, -1)
    return Call(args=(source.normal(ROWS, 64), source.normal(9, 64)), options=options)


def sparse_attention(source: Source, *, pool: bool, picks: bool) -> Call:
    first = torch.cat([torch.arange(20), torch.arange(17)]).to(torch.int32)
    low, high = (first - 6).clamp(min=0), first.clone()
    high[3:7] = 7  # a picture sees to its end
    low[-1], high[-1] = 1, 0  # a padding row sees nothing
    options: dict[str, Any] = {"scale": 0.2, "window_width": 11}
    if pool:
        options |= {
            "pool_NBD": source.normal(9, 3, 32),
            "pool_table_SP": TABLE,
            "visible_T": (first + 1) // 2,
            "pool_width": 11,
        }
    if picks:
        chosen = torch.stack([torch.randperm(12, generator=source.generator)[:4] - 1 for _ in range(ROWS)]).int()
        options |= {"picks_TX": chosen, "pool_width": 4}
    args = (source.normal(ROWS, 3, 32), source.normal(9, 6, 32), TABLE, SEQUENCE, low, high)
    return Call(args=(*args, source.normal(3, dtype=torch.float32)), options=options)


def index_topk(source: Source, *, blocks: bool) -> Call:
    options: dict[str, Any] = {"k": 5, "max_visible": 12, "stepwise": False}
    if blocks:
        options |= {"blocks_TY": source.below(5, ROWS, 2) - 1, "block_size": 3}
    return Call(args=_index_inputs(source), options=options, exact=True)


def index_blocks(source: Source) -> Call:
    options = {"num_blocks": 2, "block_size": 3, "max_visible": 12, "stepwise": False}
    return Call(args=_index_inputs(source), options=options, exact=True)


def _index_inputs(source: Source) -> tuple[torch.Tensor, ...]:
    visible = torch.arange(ROWS, dtype=torch.int32) % 13
    q, weights = source.normal(ROWS, 4, 16), source.normal(ROWS, 4)
    return q, weights, source.normal(9, 3, 16), TABLE, SEQUENCE, visible


def compress_pool(source: Source, *, overlap: bool) -> Call:
    group = 8 if overlap else 4
    sources = source.below(ROWS + 12, 6, group) - 12
    sources[0, : group // 2] = -1
    sources = torch.where(sources > ROWS - 1, -1, sources)
    sources[:, -1] = 5  # at least one source is there
    width = 4 * 24 if overlap else 2 * 24
    rows, state = (source.normal(n, width, dtype=torch.float32) for n in (ROWS, 15))
    return Call(args=(rows, state, sources), options={"overlap": overlap})


def hyper_mix(source: Source) -> Call:
    fn, scale, base = (source.normal(*s, dtype=torch.float32, scale=0.1) for s in ((24, 4 * 48), (3,), (24,)))
    options = {"norm_eps": 1e-6, "hc_eps": 1e-4, "rounds": 4}
    return Call(args=(source.normal(ROWS, 4, 48), fn, scale, base), options=options)


def hyper_head(source: Source) -> Call:
    weights = (source.normal(*s, dtype=torch.float32, scale=0.1) for s in ((4, 4 * 48), (1,), (4,)))
    return Call(args=(source.normal(ROWS, 4, 48), *weights), options={"norm_eps": 1e-6, "hc_eps": 1e-4})


def linear_largest(source: Source) -> Call:
    skip = source.below(4, 72) == 0
    return Call(args=(source.normal(ROWS, 192), source.weight(72, 192), skip), options={})


def hyper_collapse(source: Source) -> Call:
    return Call(args=(source.normal(ROWS, 4, 48), source.normal(ROWS, 4, dtype=torch.float32)), options={})


def hyper_expand(source: Source) -> Call:
    post, comb = source.normal(ROWS, 4, dtype=torch.float32), source.normal(ROWS, 4, 4, dtype=torch.float32)
    return Call(args=(source.normal(ROWS, 48), source.normal(ROWS, 4, 48), post, comb), options={})


def rope_partial(source: Source, *, inverse: bool) -> Call:
    angle = source.normal(ROWS, 8, dtype=torch.float32)
    return Call(args=(source.normal(ROWS, 3, 40), angle.cos(), angle.sin()), options={"inverse": inverse})


def rope_half(source: Source) -> Call:
    angle = source.normal(ROWS, 16, dtype=torch.float32)
    wide = source.normal(ROWS, 3, 3, 32)
    return Call(args=(wide[:, :2].flatten(1, 2), angle.cos(), angle.sin()), options={})


def silu_mul(source: Source) -> Call:
    return Call(args=(source.normal(ROWS, 2 * 1100, scale=3.0),), options={})


def swiglu(source: Source) -> Call:
    return Call(args=(source.normal(ROWS, 72, scale=3.0), source.normal(ROWS, 72, scale=3.0)), options={"limit": 2.0})


def add_shared(source: Source) -> Call:
    return Call(args=(source.normal(ROWS, 72, dtype=torch.float32), source.normal(ROWS, 72)), options={})


def compress_rows(source: Source) -> Call:
    kv, gate, ape = (source.normal(rows, 40, dtype=torch.float32) for rows in (ROWS, ROWS, 4))
    return Call(args=(kv, gate, ape, torch.arange(ROWS) % 4), options={}, exact=True)


def rms_norm(source: Source) -> Call:
    return Call(args=(source.normal(ROWS, 96), source.normal(96, dtype=torch.float32)), options={"eps": 1e-6})


def fake_quant(source: Source, spec: FakeQuant) -> Call:
    wide = source.normal(ROWS, 200, dtype=torch.float32).exp().to(source.dtype)
    return Call(args=(wide, spec), options={"dims": 160, "tail_bf16": True}, exact=True)


def hadamard(source: Source) -> Call:
    return Call(args=(source.normal(ROWS, 3, 128),), options={})


def cache_write(source: Source) -> Call:
    write = torch.randperm(54, generator=source.generator)[:ROWS]
    write[::5] = -1
    return Call(args=(source.normal(9, 6, 32), source.normal(ROWS, 32), write), options={}, exact=True, written=0)


def vit_attention(source: Source) -> Call:
    offsets = (0, 1, 20, ROWS)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    q, k, v = (source.normal(ROWS, 2, 64) for _ in range(3))
    return Call(args=(q, k, v, cu_seqlens), options={"offsets": offsets, "scale": 0.125})


Builder = Callable[[Source], Call]
CASES: dict[tuple[str, str], Builder] = {
    ("linear_block", "bf16"): lambda source: linear_block(source, BF16),
    ("linear_block", "fp8"): lambda source: linear_block(source, fp8((128, 128))),
    ("linear_block", "fp8 32"): lambda source: linear_block(source, fp8((32, 32))),
    ("linear_block", "fp4"): lambda source: linear_block(source, FP4),
    ("linear_grouped", "bf16"): linear_grouped,
    ("experts_grouped", "bf16"): lambda source: experts_grouped(source, BF16),
    ("experts_grouped", "fp4"): lambda source: experts_grouped(source, FP4),
    ("lora_delta", "dense"): lambda source: lora_delta(source, 1),
    ("lora_delta", "groups"): lambda source: lora_delta(source, 3),
    ("router_topk", "text"): lambda source: router_topk(source, pictures=False, forced=False),
    ("router_topk", "pictures"): lambda source: router_topk(source, pictures=True, forced=False),
    ("router_topk", "hashed"): lambda source: router_topk(source, pictures=True, forced=True),
    ("router_topk", "padding"): lambda source: router_topk(source, pictures=False, forced=False, padding=True),
    ("sparse_attention", "window"): lambda source: sparse_attention(source, pool=False, picks=False),
    ("sparse_attention", "pool"): lambda source: sparse_attention(source, pool=True, picks=False),
    ("sparse_attention", "picks"): lambda source: sparse_attention(source, pool=True, picks=True),
    ("index_topk", "all"): lambda source: index_topk(source, blocks=False),
    ("index_topk", "blocks"): lambda source: index_topk(source, blocks=True),
    ("index_blocks", "all"): index_blocks,
    ("compress_pool", "overlap"): lambda source: compress_pool(source, overlap=True),
    ("compress_pool", "plain"): lambda source: compress_pool(source, overlap=False),
    ("hyper_mix", "all"): hyper_mix,
    ("hyper_head", "all"): hyper_head,
    ("linear_largest", "all"): linear_largest,
    ("hyper_collapse", "all"): hyper_collapse,
    ("hyper_expand", "all"): hyper_expand,
    ("rope_partial", "forward"): lambda source: rope_partial(source, inverse=False),
    ("rope_partial", "inverse"): lambda source: rope_partial(source, inverse=True),
    ("rope_half", "all"): rope_half,
    ("silu_mul", "all"): silu_mul,
    ("swiglu", "all"): swiglu,
    ("add_shared", "all"): add_shared,
    ("compress_rows", "all"): compress_rows,
    ("rms_norm", "weight"): rms_norm,
    ("fake_quant", "e4m3"): lambda source: fake_quant(source, FakeQuant(element="e4m3", block=64)),
    ("fake_quant", "e2m1"): lambda source: fake_quant(source, FakeQuant(element="e2m1", block=32)),
    ("fake_quant", "e2m1 e4m3"): lambda source: fake_quant(source, FakeQuant(element="e2m1", block=16, scale="e4m3")),
    ("hadamard", "all"): hadamard,
    ("cache_write", "all"): cache_write,
    ("vit_attention", "all"): vit_attention,
}


def to_device(value: Any, device: str) -> Any:
    """The same argument with every tensor in it on `device`; always a copy, for ops that write in place."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    if isinstance(value, Packed):
        scale = None if value.scale is None else value.scale.to(device)
        return replace(value, data=value.data.to(device), scale=scale)
    if isinstance(value, dict):
        return {key: to_device(part, device) for key, part in value.items()}
    return value


def run_call(op: Callable[..., Any], call: Call, device: str) -> tuple[torch.Tensor, ...]:
    """The op's results on `device`, as a tuple."""
    args = tuple(to_device(arg, device) for arg in call.args)
    with torch.inference_mode():
        out = op(*args, **to_device(call.options, device))
    if call.written is not None:
        return (args[call.written],)
    return out if isinstance(out, tuple) else (out,)
