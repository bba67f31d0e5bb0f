"""Training on a GPU, where experts and sequences are computed many at once: the gradients of the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from spyglass.engram.feed import EngramFeed
from spyglass.ops.experts_grouped.adapters import ExpertAdapters, ExpertRanks
from spyglass.ops.lora_delta.rank_rows import RankRows
from spyglass.ops.sparse_attention.reference import Turn
from spyglass.ops.table import bind_ops
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16, FP4, FakeQuant, fp8
from spyglass.quant.packed import Packed
from spyglass.train.loss import step_logits, token_loss
from spyglass.train.packing import pack
from spyglass.train.recompute import recompute_layers
from tests import small_v41
from tests.ops.call import Source, to_device
from tests.ops.paged_cases import sparse_attention
from tests.ops.test_training_ops import as_adapters, expert_call, leaves_of_pairs
from tests.tolerance import GRADIENT_OF_MAX, OP_FLOAT32, ROUNDED_GRADIENT_OF_MAX, assert_close
from tests.unit.train.leaves import FAMILIES, family
from tests.unit.train.test_gradients import adapter_on, samples_for

pytestmark = pytest.mark.gpu
OPS = bind_ops("cuda", "float32", "training")
TRAINS = bind_ops("cuda", "bfloat16", "training")


def same_gradients(run: Callable[..., torch.Tensor], leaves: list[torch.Tensor], of_max: float | None = None) -> None:
    """`run(device, *leaves)` has the value and the gradients on a GPU that it has on the host.

    As closely as fp32 sums, or up to a share `of_max` of the largest.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for device in ("cpu", "cuda"):
        fresh = [leaf.detach().clone().to(device).requires_grad_() for leaf in leaves]  # not the caller's own tensors
        out = run(device, *fresh)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(device, out.dtype)
        found[device] = [out, *torch.autograd.grad((out * weight).sum(), fresh)]
    for number, (ours, expected) in enumerate(zip(found["cuda"], found["cpu"], strict=True)):
        assert ours.is_cuda and expected.any()
        if of_max is None:
            assert_close(ours, expected, OP_FLOAT32, f"leaf {number - 1}")
        else:
            worst = (ours.cpu().double() - expected.double()).abs().max() / expected.abs().max()
            assert worst <= of_max, f"leaf {number - 1}: {worst}"


def test_experts_with_their_pairs() -> None:
    x, ids, weights, stacks = expert_call(FP4)

    def run(device: str, x: torch.Tensor, weights: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        here: list[Packed] = [to_device(stack, device) for stack in stacks]
        out: torch.Tensor = OPS.experts_grouped(
            x, ids.to(device), weights, *here, limit=0.8, **as_adapters(leaves, device=device)
        )
        return out

    same_gradients(run, [x, weights, *leaves_of_pairs(Source(torch.float32))])


def rank_rows(rows: int, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, device: str, groups: int = 1) -> RankRows:
    adapter_T = torch.ones(rows, dtype=torch.int32, device=device)
    adapter_T[3] = 0
    return RankRows(
        x_TGI=x.view(rows, groups, -1),
        adapter_T=adapter_T,
        a_RI=a,
        b_RGO=b.unflatten(1, (groups, -1)),
        adapter_R=torch.ones(len(a), dtype=torch.int32, device=device),
        scale_R=torch.linspace(0.5, 2.0, len(a), device=device),
    )


@pytest.mark.parametrize("name", ["bf16", "fp4", "fp8 128", "fp8 32"])
def test_bf16_maps_with_a_pair(name: str) -> None:
    """Products of matrix units, whose columns are the rank rows; a bias of bf16 and one of fp32."""
    formats = {"bf16": BF16, "fp4": FP4, "fp8 128": fp8((128, 128)), "fp8 32": fp8((32, 32))}
    source, rows = Source(torch.float32), 300
    x, a, b = source.normal(rows, 512).bfloat16(), source.normal(16, 512) * 0.1, source.normal(16, 768) * 0.1
    weight = encode(source.normal(768, 512) * 512**-0.5, formats[name])
    rounding = None if name == "bf16" else FakeQuant(element="e4m3", block=128)

    def dense(
        bias: torch.Tensor | None, device: str, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        options: dict[str, Any] = {"rounding": rounding, "bias_O": None if bias is None else bias.to(device)}
        pair, here = rank_rows(rows, x, a, b, device), to_device(weight, device)
        out: torch.Tensor = TRAINS.linear_block(x, here, addend_TO=pair, **options)
        return out

    for bias in (None, source.normal(768), source.normal(768).bfloat16()):
        same_gradients(partial(dense, bias), [x, a, b], ROUNDED_GRADIENT_OF_MAX)

    def grouped(device: str, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        pair, here = rank_rows(rows, x, a, b, device, 3), to_device(weight, device)
        out: torch.Tensor = TRAINS.linear_grouped(x, here, addend_TGO=pair)
        return out

    x = source.normal(rows, 3, 512).bfloat16()
    same_gradients(grouped, [x, a, b], ROUNDED_GRADIENT_OF_MAX)


@pytest.mark.parametrize("rounding", [None, FakeQuant(element="e4m3", block=128)])
def test_bf16_experts_with_their_pairs(rounding: FakeQuant | None) -> None:
    source = Source(torch.float32)
    ids = torch.stack([torch.randperm(8, generator=source.generator)[:3] for _ in range(300)]).to(torch.int32)
    ids[4] = -1
    ids[ids == 3] = 5
    shapes, rank = {"w1": (256, 512), "w3": (256, 512), "w2": (512, 256)}, 16
    stacks = [encode(source.normal(8, *shape) * shape[1] ** -0.5, FP4) for shape in shapes.values()]
    x, weights = source.normal(300, 512).bfloat16(), torch.rand(300, 3, generator=source.generator)
    leaves = [source.normal(8 * rank, side) * 0.1 for shape in shapes.values() for side in (shape[1], shape[0])]

    def run(device: str, x: torch.Tensor, weights: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        scale_R = torch.linspace(0.5, 2.0, 8 * rank, device=device)
        start_AE1 = torch.arange(0, 8 * rank + 1, rank, dtype=torch.int32, device=device)[None]
        ranks = {
            name: ExpertRanks(a, b, scale_R, start_AE1, ((rank,) * 8,))
            for name, a, b in zip(shapes, leaves[::2], leaves[1::2], strict=True)
        }
        slots = torch.ones(300, dtype=torch.int32, device=device)
        here = [to_device(stack, device) for stack in stacks]
        adapters = ExpertAdapters(slots[:1], ranks)
        options: dict[str, Any] = {"limit": 1.0, "rounding": rounding, "adapter_T": slots, "adapters": adapters}
        out: torch.Tensor = TRAINS.experts_grouped(x, ids.to(device), weights, *here, **options)
        return out

    same_gradients(run, [x, weights, *leaves], ROUNDED_GRADIENT_OF_MAX)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streams_norms_rotations_and_gates(dtype: torch.dtype) -> None:
    source = Source(torch.float32)
    of_max = None if dtype == torch.float32 else ROUNDED_GRADIENT_OF_MAX
    rows, streams, width = 37, 4, 1024
    weights = (source.normal(24, 4 * width) * 0.02, source.normal(3), source.normal(24), source.normal(width))
    tables = source.normal(rows, 32), source.normal(rows, 32)
    constants: dict[str, Any] = {"norm_eps": 1e-6, "hc_eps": 1e-6, "rounds": 20, "eps": 1e-6}
    z, x = source.normal(rows, width).to(dtype), source.normal(rows, streams, width).to(dtype)
    post, comb = source.normal(rows, streams), source.normal(rows, streams, streams)

    def joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.cat([part.flatten().float() for part in parts])

    def of(name: str, *rest: torch.Tensor, **options: Any) -> Callable[..., torch.Tensor]:
        def run(device: str, *leaves: torch.Tensor) -> torch.Tensor:
            more = {key: to_device(value, device) for key, value in options.items()}
            out = getattr(TRAINS, name)(*leaves, *(one.to(device) for one in rest), **more)
            return joined(out) if isinstance(out, tuple) else out

        return run

    def write_read(device: str, z: torch.Tensor, shared: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        here = [one.to(device) for one in weights]
        return joined(TRAINS.hyper_write_read(z, shared, *leaves, *here, **constants))

    same_gradients(of("hyper_read", *weights, **constants), [x], of_max)
    same_gradients(of("hyper_expand"), [z, x, post, comb], of_max)
    same_gradients(write_read, [z.float(), z.flip(0), x, post, comb], of_max)
    same_gradients(of("rms_norm", weights[3], eps=1e-6), [z], of_max)
    for heads, options in ((8, {"eps": 1e-6, "stepwise": True}), (8, {"hadamard": True})):
        same_gradients(of("row_finish", *tables, **options), [source.normal(rows, heads, 128).to(dtype)], of_max)
    same_gradients(of("row_finish", *tables, weight_D=weights[3][:512], eps=1e-6), [z[:, :512]], of_max)
    same_gradients(of("rope_half", *tables), [source.normal(rows, 6, 64).to(dtype)], of_max)
    same_gradients(of("silu_mul"), [z], of_max)
    same_gradients(of("swiglu", limit=1.0), [z, z.flip(0)], of_max)


@pytest.mark.parametrize("topk", [False, True])
def test_attention_over_pools(topk: bool) -> None:
    call = sparse_attention(Source(torch.float32), pool=True, topk="chosen" if topk else "")
    q, window, *places, sink = call.args
    options: dict[str, Any] = {name: value for name, value in call.options.items() if name != "pool_NBD"}

    def run(device: str, q: torch.Tensor, window: torch.Tensor, sink: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        here = [to_device(place, device) for place in places]
        out: torch.Tensor = OPS.sparse_attention(q, window, *here, sink, **to_device(options, device), pool_NBD=pool)
        return out

    same_gradients(run, [q, window, sink, call.options["pool_NBD"]])


@pytest.mark.parametrize("pool", ["", "all", "chosen"])
def test_bf16_attention_at_released_sizes(pool: str) -> None:
    """64 heads of 512 channels, two sequences, q normed and turned inside; memory that nobody wrote is NaN."""
    source, lengths, heads, dim, ratio = Source(torch.float32), (150, 61), 64, 512, 4
    rows, entries = sum(lengths), [length // ratio for length in lengths]
    position = torch.cat([torch.arange(length) for length in lengths]).int()
    seq = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths)).int()
    table = torch.full((2, max(lengths)), -1, dtype=torch.int32)
    pools = torch.full((2, max(entries)), -1, dtype=torch.int32)
    for number, (length, count) in enumerate(zip(lengths, entries, strict=True)):
        table[number, :length] = torch.arange(length) + number * lengths[0]
        pools[number, :count] = torch.arange(count) + number * entries[0]
    q, window = source.normal(rows, heads, dim).bfloat16(), source.normal(rows + 1, 1, dim).bfloat16()
    latents, sink = source.normal(sum(entries) + 1, 1, dim).bfloat16(), source.normal(heads)
    window[-1] = latents[-1] = float("nan")
    visible = (position + 1) // ratio
    topk_indices = torch.stack(
        [torch.randperm(max(entries), generator=source.generator)[:16] for _ in range(rows)]
    ).int()
    places = (table, seq, (position - 127).clamp(min=0), position)
    more: dict[str, Any] = {"pool_table_SP": pools, "visible_T": visible, "pool_width": max(entries)}
    if pool == "chosen":
        more |= {"topk_indices_TX": topk_indices.sort(dim=1).values, "pool_width": 16}
    cos, sin = source.normal(rows, 32), source.normal(rows, 32)
    angle = torch.atan2(sin, cos)
    turn = Turn(cos_TR=angle.cos(), sin_TR=angle.sin(), eps=1e-6, stepwise=True)

    def run(device: str, q: torch.Tensor, sink: torch.Tensor, *leaves: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"scale": dim**-0.5, "window_width": 128, "turn": to_device(turn, device)}
        if len(leaves) > 1:
            options |= to_device(more, device) | {"pool_NBD": leaves[1]}
        here = [to_device(place, device) for place in places]
        out: torch.Tensor = TRAINS.sparse_attention(q, leaves[0], *here, sink, **options)
        return out

    same_gradients(run, [q, sink, window, *([latents] if pool else [])], ROUNDED_GRADIENT_OF_MAX)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_model_gives_its_adapters_the_gradients_of_the_host(name: str) -> None:
    """In float32, on packed weights, layers computed again; experts, sequences and pictures in few launches."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for device in ("cpu", "cuda"):
        model = family(name, packed=True, expand=False, device=device)
        recompute_layers(model)
        adapter, feed = adapter_on(model), None
        if name == "v41":
            feed = EngramFeed(small_v41.small_store(model.config), device=torch.device(device), dtype=torch.float32)
        step = pack(
            samples_for(model),
            model.config,
            device=device,
            dtype=torch.float32,
            adapter_id=adapter.adapter_id,
            engram=feed,
        )
        loss = token_loss(step_logits(model, step), step.targets_R)[0]
        grads = torch.autograd.grad(loss, list(adapter.parameters.values()))
        found[device] = dict(zip(adapter.parameters, grads, strict=True))
    largest = max(float(gradient.abs().max()) for gradient in found["cpu"].values())
    for leaf, expected in found["cpu"].items():
        assert expected.any(), leaf
        assert (found["cuda"][leaf].cpu() - expected).abs().max() <= GRADIENT_OF_MAX * largest, leaf
