"""Ops written for training: the reference's values bit for bit, its gradients, and packed weights kept packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import spyglass.ops.experts_grouped.training as experts
import spyglass.ops.sparse_attention.blocks as attention
from spyglass.errors import DeviceError
from spyglass.ops.experts_grouped.adapters import ExpertAdapters, ExpertRanks
from spyglass.ops.table import OPS, bind_ops, describe
from spyglass.quant.codec import decode, encode
from spyglass.quant.formats import BF16, F32, FP4, FakeQuant, Format, fp8
from spyglass.quant.packed import Packed
from tests.ops.call import Source, assert_agrees, run_call, tolerance_of
from tests.ops.cases import CASES, TRAINED
from tests.ops.paged_cases import sparse_attention
from tests.tolerance import OP_FLOAT32, assert_close

A8 = FakeQuant(element="e4m3", block=128)
OURS = [(op, case) for op, case in TRAINED if describe("cpu", "float32", "training")[op] == "training"]
TRAINING, REFERENCE = (bind_ops("cpu", "float32", which) for which in ("training", "reference"))  # type: ignore[arg-type]
FORMATS = {"f32": F32, "bf16": BF16, "fp8": fp8((32, 32)), "fp4": FP4}


def test_training_takes_its_own_implementation_or_the_reference() -> None:
    chosen = describe("cuda", "bfloat16", "training")
    assert set(chosen.values()) == {"training", "reference"} and set(chosen) == set(OPS)
    with pytest.raises(DeviceError, match="'auto', 'reference' or 'training'"):
        describe("cpu", "float32", "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "case"), OURS)
def test_values_are_those_of_the_reference(op: str, case: str, dtype: torch.dtype) -> None:
    for rows in (1, 37):
        call = CASES[op, case](Source(dtype, rows))
        call = replace(call, exact=op != "sparse_attention")
        want = run_call(getattr(REFERENCE, op), call)
        assert_agrees(call, run_call(getattr(TRAINING, op), call), want, tolerance_of(dtype), f"{rows} rows")


def gradients(run: Callable[..., torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    fresh = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = run(*fresh)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    return list(torch.autograd.grad((out * weight).sum(), fresh))


def same_gradients(
    ours: Callable[..., torch.Tensor], theirs: Callable[..., torch.Tensor], *leaves: torch.Tensor
) -> None:
    got, want = gradients(ours, list(leaves)), gradients(theirs, list(leaves))
    for number, (gradient, expected) in enumerate(zip(got, want, strict=True)):
        assert expected.any(), number
        assert_close(gradient, expected, OP_FLOAT32, f"leaf {number}")


def test_rounding_counts_as_the_identity() -> None:
    """The definition of straight-through: d out / d x = 1, in channels that are rounded and in those that are not."""
    for spec, dims, tail in [(A8, None, False), (A8, 128, True), (FakeQuant(element="e2m1", block=32), None, False)]:
        x = torch.randn(5, 192, requires_grad=True)
        out = TRAINING.fake_quant(x, spec, dims=dims, tail_bf16=tail)
        assert not torch.equal(out, x)
        weight = torch.randn(out.shape)
        (gradient,) = torch.autograd.grad((out * weight).sum(), [x])
        assert torch.equal(gradient, weight)


@pytest.mark.parametrize("name", FORMATS)
def test_the_gradient_of_a_product_is_that_of_the_decoded_weight(name: str) -> None:
    weight = encode(torch.randn(40, 64), FORMATS[name])
    plain = Packed(F32, decode(weight, torch.float32), None, weight.shape)
    x, addend, bias = torch.randn(2, 3, 64), torch.randn(2, 3, 40), torch.randn(40)
    rounding = None if FORMATS[name].block is None else A8
    same_gradients(
        lambda x, addend, bias: TRAINING.linear_block(x, weight, rounding=rounding, addend_TO=addend, bias_O=bias),
        lambda x, addend, bias: REFERENCE.linear_block(x, plain, addend_TO=addend, bias_O=bias),
        *(x, addend, bias),
    )
    x, addend = torch.randn(7, 2, 64), torch.randn(7, 2, 20)
    same_gradients(
        lambda x, addend: TRAINING.linear_grouped(x, weight, addend_TGO=addend),
        lambda x, addend: REFERENCE.linear_grouped(x, plain, addend_TGO=addend),
        *(x, addend),
    )


def test_plain_weights_may_be_trained() -> None:
    def with_weight(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x, data: op(x, Packed(F32, data, None, tuple(data.shape)))

    x, data = torch.randn(2, 3, 64), torch.randn(40, 64)
    same_gradients(with_weight(TRAINING.linear_block), with_weight(REFERENCE.linear_block), x, data)
    x = torch.randn(7, 2, 64)
    same_gradients(with_weight(TRAINING.linear_grouped), with_weight(REFERENCE.linear_grouped), x, data)


def expert_call(format: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Packed]]:
    source = Source(torch.float32)
    ids = torch.stack([torch.randperm(6, generator=source.generator)[:2] for _ in range(19)]).to(torch.int32)
    ids[4] = -1
    ids[ids == 3] = 5  # an expert that nobody chose, rows that chose one twice, and the last has the most
    stacks = [source.weight(6, *shape, format=format) for shape in ((32, 64), (32, 64), (64, 32))]
    return source.normal(19, 64), ids, torch.rand(19, 2, generator=source.generator), stacks


ONE_OR_MANY = [(1, 1 << 14), (2, 1 << 14), (8, 1 << 14), (8, 20)]  # experts in a chunk, and its rows


def at_once(monkeypatch: pytest.MonkeyPatch, most: int, rows: int) -> None:
    """Let chunks be as on a GPU."""
    monkeypatch.setattr(experts, "experts_at_once", lambda *_: most)
    monkeypatch.setattr(experts, "ROWS_AT_ONCE", rows)


@pytest.mark.parametrize(("most", "rows"), ONE_OR_MANY)
@pytest.mark.parametrize("name", ["f32", "fp4"])
def test_the_gradient_of_experts_is_that_of_the_decoded_ones(
    name: str, most: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once(monkeypatch, most, rows)
    x, ids, weights, stacks = expert_call(FORMATS[name])
    plain = [Packed(F32, decode(stack, torch.float32), None, stack.shape) for stack in stacks]
    same_gradients(
        lambda x, weights: TRAINING.experts_grouped(x, ids, weights, *stacks, limit=0.8),
        lambda x, weights: REFERENCE.experts_grouped(x, ids, weights, *plain, limit=0.8),
        *(x, weights),
    )


@pytest.mark.parametrize(("most", "rows"), ONE_OR_MANY)
def test_the_sum_over_experts_runs_in_ascending_order(most: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs 2^24, 1 and -2^24 of experts 0, 1, 2, whatever the order of choice: one order only loses the 1."""
    at_once(monkeypatch, most, rows)
    gate, up = torch.ones(3, 1, 32), torch.ones(3, 1, 32) / 32
    down = torch.tensor([2.0**24, 1.0, -(2.0**24)]).view(3, 1, 1).expand(3, 32, 1).contiguous()
    stacks = [Packed(F32, data, None, tuple(data.shape)) for data in (gate, up, down)]
    orders = [[0, 1, 2], [2, 1, 0], [1, 2, 0]]
    call = (torch.ones(3, 32), torch.tensor(orders, dtype=torch.int32), torch.ones(3, 3), *stacks)
    ours, theirs = (op.experts_grouped(*call, limit=100.0) for op in (TRAINING, REFERENCE))
    assert torch.equal(ours, theirs) and torch.equal(ours, ours[:1].expand_as(ours))


def leaves_of_pairs(source: Source) -> list[torch.Tensor]:
    """A and B of w1, w3 and w2, rank 3, for the experts of `expert_call`."""
    shapes = [(6, 3, 64), (6, 3, 32), (6, 3, 64), (6, 3, 32), (6, 3, 32), (6, 3, 64)]
    return [source.normal(*shape) * 0.2 for shape in shapes]


def as_adapters(
    leaves: tuple[torch.Tensor, ...], dropout: float = 0.0, only: str | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """One adapter of rank 3 for all rows of `expert_call`, as options of the op."""
    scale_R = torch.linspace(0.5, 2.0, 18, device=device)
    start_AE1 = torch.arange(0, 19, 3, dtype=torch.int32, device=device)[None]
    halves = zip(("w1", "w3", "w2"), leaves[::2], leaves[1::2], strict=True)
    matrices = {
        name: ExpertRanks(a.flatten(0, 1), b.flatten(0, 1), scale_R, start_AE1, ((3,) * 6,))
        for name, a, b in halves
        if only in (None, name)
    }
    adapter_ids = torch.ones(len(expert_call(F32)[0]), dtype=torch.int32, device=device)
    return {"adapter_T": adapter_ids, "adapters": ExpertAdapters(adapter_ids[:1], matrices, dropout)}


@pytest.mark.parametrize(("most", "rows"), ONE_OR_MANY)
@pytest.mark.parametrize("rounding", [None, FakeQuant(element="e4m3", block=32)])
def test_pairs_beside_experts_are_those_of_the_reference(
    rounding: FakeQuant | None, most: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, and without rounding gradients too: of the rows, of the routing weights and of every pair."""
    at_once(monkeypatch, most, rows)
    x, ids, weights, stacks = expert_call(FP4)
    plain = [Packed(F32, decode(stack, torch.float32), None, stack.shape) for stack in stacks]
    leaves = leaves_of_pairs(Source(torch.float32))

    def run(op: Callable[..., torch.Tensor], stacks: list[Packed]) -> Callable[..., torch.Tensor]:
        return lambda x, weights, *leaves: op(
            x, ids, weights, *stacks, limit=0.8, rounding=rounding, **as_adapters(leaves)
        )

    ours, theirs = run(TRAINING.experts_grouped, stacks), run(REFERENCE.experts_grouped, plain)
    assert_close(ours(x, weights, *leaves), theirs(x, weights, *leaves), OP_FLOAT32)
    if rounding is None:
        same_gradients(ours, theirs, x, weights, *leaves)
    without = TRAINING.experts_grouped(x, ids, weights, *stacks, limit=0.8, rounding=rounding)
    assert (ours(x, weights, *leaves) - without).abs().max() > 0.1


def test_an_adapter_of_one_matrix_leaves_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch, 8, 1 << 14)
    x, ids, weights, stacks = expert_call(F32)
    leaves = tuple(leaves_of_pairs(Source(torch.float32)))
    for matrix in ("w1", "w3", "w2"):
        ours, theirs = (
            op.experts_grouped(x, ids, weights, *stacks, limit=0.8, **as_adapters(leaves, only=matrix))
            for op in (TRAINING, REFERENCE)
        )
        assert_close(ours, theirs, OP_FLOAT32, matrix)


def test_dropout_of_pairs_drops_inputs_of_pairs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch, 8, 1 << 14)
    x, ids, weights, stacks = expert_call(F32)
    leaves = tuple(leaves_of_pairs(Source(torch.float32)))
    options: dict[str, Any] = {"limit": 0.8}

    def run(dropout: float) -> torch.Tensor:
        return TRAINING.experts_grouped(x, ids, weights, *stacks, **options, **as_adapters(leaves, dropout))

    base = TRAINING.experts_grouped(x, ids, weights, *stacks, **options)
    assert torch.equal(run(1.0), base), "all dropped: nothing is added"
    assert not torch.equal(run(0.5), base) and not torch.equal(run(0.5), run(0.0))
    assert not torch.equal(run(0.5), run(0.5)), "drawn anew each time"


@pytest.mark.parametrize(("most", "rows"), ONE_OR_MANY)
def test_every_choice_has_a_row_of_its_expert_and_chunks_are_bounded(most: int, rows: int) -> None:
    _, ids, _, _ = expert_call(F32)
    with pytest.MonkeyPatch.context() as patch:
        at_once(patch, most, rows)
        layout = experts.lay_out(ids, 6, most)
    expert_of_row = torch.cat([chunk.experts_G.repeat_interleave(chunk.height) for chunk in layout.chunks])
    flat = ids.flatten()
    taken = layout.place_N[flat >= 0]
    assert len(taken.unique()) == len(taken)
    assert torch.equal(expert_of_row[taken], flat[flat >= 0].long())
    assert torch.equal(layout.choice_M[taken], (flat >= 0).nonzero()[:, 0])
    padding = torch.ones(len(expert_of_row), dtype=torch.bool).index_fill(0, taken, False)
    assert (layout.token_M[padding] == len(ids)).all() and (layout.choice_M[padding] == flat.numel()).all()
    assert (layout.place_N[flat < 0] == len(expert_of_row)).all()
    assert 3 not in expert_of_row, "nobody chose it: its matrices are never decoded"
    for chunk in layout.chunks:
        assert len(chunk.experts_G) <= most and (len(chunk.experts_G) == 1 or chunk.rows <= rows)


def test_plain_experts_may_be_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch, 4, 1 << 14)
    x, ids, weights, stacks = expert_call(F32)

    def run(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*data: torch.Tensor) -> torch.Tensor:
            packed = [replace(stack, data=values) for stack, values in zip(stacks, data, strict=True)]
            return op(x, ids, weights, *packed, limit=0.8)

        return call

    same_gradients(run(TRAINING.experts_grouped), run(REFERENCE.experts_grouped), *(stack.data for stack in stacks))


def kept_bytes(run: Callable[[], torch.Tensor], but: set[int]) -> int:
    """Bytes that autograd keeps for the backward, of memory that is not among `but`."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in but:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    assert out.requires_grad
    return sum(kept.values())


def storages(*values: Any) -> set[int]:
    tensors = [t for v in values for t in ((v.data, v.scale) if isinstance(v, Packed) else (v,)) if t is not None]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_packed_weights_stay_packed_between_the_passes() -> None:
    x, weight = torch.randn(3, 512, requires_grad=True), encode(torch.randn(512, 512), FP4)
    own = storages(x, weight)
    assert kept_bytes(lambda: TRAINING.linear_block(x, weight, rounding=A8), own) < 512 * 512 // 8
    assert kept_bytes(lambda: REFERENCE.linear_block(x, weight), own) >= 512 * 512 * 4
    grouped = torch.randn(3, 2, 512, requires_grad=True)
    assert kept_bytes(lambda: TRAINING.linear_grouped(grouped, weight), storages(grouped, weight)) < 512 * 512 // 8
    stacks = [encode(torch.randn(4, 256, 256), FP4) for _ in range(3)]
    ids, weights = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    rows = torch.randn(3, 256, requires_grad=True)
    own = storages(rows, weights, *stacks)
    assert kept_bytes(lambda: TRAINING.experts_grouped(rows, ids, weights, *stacks, limit=1.0), own) < 256 * 256


def test_a_router_score_that_underflows_has_a_finite_gradient() -> None:
    x, weight = torch.tensor([[1.0]], requires_grad=True), torch.tensor([[-200.0], [3.0], [2.0]])
    ids, weights = TRAINING.router_topk(
        x, weight, k=2, scale=1.0, bias_E=None, forced_TK=torch.tensor([[0, 1]], dtype=torch.int32)
    )
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[0.0, 1.0]]
    (gradient,) = torch.autograd.grad(weights[0, 1] * 2 + weights[0, 0], [x])
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("pool", "topk"), [(False, ""), (True, ""), (True, "chosen")])
@pytest.mark.parametrize("logits_at_once", [1 << 25, 150])
@pytest.mark.parametrize("block_logits", [0, 1500, 1 << 27])
def test_the_gradient_of_attention_is_that_of_the_reference(
    pool: bool, topk: str, logits_at_once: int, block_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one part per sequence and in many, alone and several in a block."""
    monkeypatch.setattr(attention, "LOGITS_AT_ONCE", logits_at_once)
    monkeypatch.setattr(attention, "block_limit", lambda _: block_logits)
    # every row sees something: the reference has no gradient for one that does not
    call = sparse_attention(Source(torch.float32, padding=False), pool=pool, topk=topk)
    q, window, *places, sink = call.args

    def run(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def attend(q: torch.Tensor, window: torch.Tensor, sink: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            options = call.options | ({"pool_NBD": rest[0]} if rest else {})
            return op(q, window, *places, sink, **options)

        return attend

    leaves = [q, window, sink, *([call.options["pool_NBD"]] if pool else [])]
    same_gradients(run(TRAINING.sparse_attention), run(REFERENCE.sparse_attention), *leaves)
    ours, theirs = (run(op)(*leaves) for op in (TRAINING.sparse_attention, REFERENCE.sparse_attention))
    assert_close(ours, theirs, OP_FLOAT32)


@pytest.mark.parametrize("block_logits", [0, 1 << 27])
def test_a_block_of_attention_has_every_sequence_once_and_every_row_comes_once(
    block_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts of one sequence would add to the same rows of pages, in any order."""
    monkeypatch.setattr(attention, "LOGITS_AT_ONCE", 150)
    monkeypatch.setattr(attention, "block_limit", lambda _: block_logits)
    call = sparse_attention(Source(torch.float32), pool=True)
    _, _, table, seq, lo, hi, _ = call.args
    options = {key: call.options[key] for key in ("pool_table_SP", "visible_T")}
    blocks = list(attention.blocks_of(attention.KeyRows(table, seq, lo, hi, topk_indices_TX=None, **options), 3))
    for block in blocks:
        sequences = [int(seq[part.first]) for part in block]
        assert len(set(sequences)) == len(sequences)
        assert len(block) == 1 or len(block) * max(part.logits(3) for part in block) <= block_logits
    assert any(len(block) > 1 for block in blocks) == (block_logits > 0)
    rows = [row for block in blocks for part in block for row in range(part.first, part.stop)]
    assert sorted(rows) == list(range(len(seq)))


def test_a_row_that_sees_nothing_is_zero_and_passes_nothing_on() -> None:
    call = sparse_attention(Source(torch.float32), pool=False)
    q, window, *places, sink = call.args
    leaves = [leaf.requires_grad_() for leaf in (q, window, sink)]
    out = TRAINING.sparse_attention(q, window, *places, sink, **call.options)
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert not out[-1].any() and not gradients[0][-1].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_attention_keeps_rows_and_no_keys() -> None:
    """What lies between the passes grows with the rows, not with rows times keys; unwritten memory is never touched."""
    call = sparse_attention(Source(torch.float32), pool=True)
    q, window, *places, sink = call.args
    window[4:5] = float("nan")  # no sequence has this page
    q.requires_grad_()
    own = storages(q, window, call.options["pool_NBD"], sink)
    assert kept_bytes(lambda: TRAINING.sparse_attention(q, window, *places, sink, **call.options), own) <= (
        (q.nbytes + q[..., 0].nbytes) * (len(q) + 1) / len(q)  # a row for padding
    )
    assert TRAINING.sparse_attention(q, window, *places, sink, **call.options).isfinite().all()
