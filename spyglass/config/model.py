"""What a model is, as frozen data: the JSON dialects end in `read_v4.py` / `read_v41.py`, everything else reads these.

A `LayerPlan` says everything one decoder layer needs to know about itself, so that no layer ever looks at a version
string, a raw config or the environment. Sources: spec v4 sections 1-7, spec v41 sections 1-3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from spyglass.quant.formats import FakeQuant, StoredRow


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN frequency scaling without attention temperature (spec v4 4.3)."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One rotary table: interleaved pairs over the last `dim` channels; layers with equal specs share one table."""

    theta: float
    dim: int
    yarn: YarnScaling | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Where the released model rounds on purpose, beyond its activation dtype; None = not rounded there.

    `numerics="plain"` uses `Rounding()` (nothing); `numerics="reference"` uses what the family was trained with.
    """

    linear: FakeQuant | None = None  # input of every FP8/FP4 linear, never wo_a, gate or head
    window: FakeQuant | None = None  # stored window rows, first `kv_dims` channels
    pool: FakeQuant | None = None  # stored compressed rows, first `kv_dims` channels
    index: FakeQuant | None = None  # index queries and keys, all channels
    hadamard: bool = False  # rotate index queries and keys before `index`
    kv_dims: int = 0  # V4: head_dim - rope_dim; V4.1: head_dim
    rope_dims_bf16: bool = False  # the channels behind kv_dims are stored as bf16 even when activations are fp32

    def stored_row(self, which: Literal["window", "pool", "index"], dim: int) -> StoredRow | None:
        """The bytes that hold what rounding leaves of a cached row of `dim` channels; None where nothing is rounded."""
        quant = {"window": self.window, "pool": self.pool, "index": self.index}[which]
        dims = dim if which == "index" else self.kv_dims
        assert quant is None or dims == dim or self.rope_dims_bf16, "channels that are not rounded need more than bf16"
        return None if quant is None else StoredRow(quant=quant, dim=dim, dims=dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorPlan:
    """How `ratio` tokens become one compressed row (spec v4 5.1, v41 4.5).

    `overlap`: a row pools the previous group too (V4 ratio 4: projections are twice as wide).
    `positional_bias`: the checkpoint has `ape`. `gated`: it has `wgate` (V4.1 ratio 1 has none).
    `index_keys`: where the layer's index keys come from: its own small compressor (V4), the latent (V4.1), or none.
    `group_rows`: un-pooled rows that one pooled row reads (B).
    """

    ratio: int
    overlap: bool
    positional_bias: bool
    gated: bool
    index_keys: Literal["compressor", "latent"] | None
    group_rows: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_rows", self.ratio * (2 if self.overlap else 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One decoder layer. `*_from` are layer indices; equal to `index` when the layer owns the thing."""

    index: int
    ratio: int  # 0 = window only
    rope: RopeSpec
    compressor: CompressorPlan | None  # set when this layer owns a compressor
    kv_from: int | None  # layer whose compressed rows are attended; None when ratio == 0
    index_from: int | None  # layer whose top-k indices are used; None = every visible row is attended
    index_keys_from: int | None  # layer whose index keys are scored (set on index sources only)
    candidates_from: int | None  # layer whose candidate blocks restrict the top-k (V4.1)
    router: Literal["hash", "topk"]
    engram: bool = False
    makes_candidates: bool = False  # this layer's scores choose the candidate blocks of later index sources (V4.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePlan:
    """The first of two selection levels (spec v41 3.3): whole blocks of entries, the newest one always among them."""

    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramConfig:
    """N-gram memory of some layers (spec v41 5): ids are hashed into rows of one table per layer.

    `num_rows[i]` belongs to `layers[i]`. `prime_above`: the hash moduli are the primes from here on (spec 5.2).
    """

    layers: tuple[int, ...]
    num_rows: tuple[int, ...]
    max_ngram: int
    prime_above: int
    num_heads: int
    head_dim: int
    pad_token_id: int
    num_classes: int  # size of the compressed vocabulary

    @property
    def lookback(self) -> int:
        """Tokens before a row that its hashes read."""
        return self.max_ngram - 1

    @property
    def columns(self) -> int:
        """Table rows that one token reads per layer."""
        return (self.max_ngram - 1) * self.num_heads

    @property
    def row_width(self) -> int:
        """Values one token reads per layer, the input width of the engram's `wkv`."""
        return self.columns * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """The text backbone, named as in the checkpoint's config.json; letters are those of docs/shapes.md."""

    vocab_size: int  # V
    hidden_size: int  # C
    num_attention_heads: int  # H
    head_dim: int  # D
    q_lora_rank: int  # Q
    o_groups: int  # G
    o_lora_rank: int  # O
    sliding_window: int  # W, counts the query itself
    index_n_heads: int  # N
    index_head_dim: int  # I
    index_topk: int  # X
    n_routed_experts: int  # E
    n_shared_experts: int
    num_experts_per_tok: int  # K
    moe_intermediate_size: int  # F
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int  # M
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    q_head_norm: bool  # weightless per-head norm of q (V4 yes, V4.1 no)
    shifted_hyper: bool  # pre mix computed by the previous sub-layer (V4.1)
    max_position_embeddings: int
    layers: tuple[LayerPlan, ...]
    reference_rounding: Rounding
    engram: EngramConfig | None = None
    candidates: CandidatePlan | None = None

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Tower, aligner and image planning (spec v4 9, v41 7)."""

    num_hidden_layers: int
    hidden_size: int  # Y
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    rope_theta: float
    downsample_ratio: int
    max_tokens: int  # V4: hard cap of a block, leading pads included; V4.1: max_image_tokens
    min_pixels: int
    max_wh_ratio: float | None
    layout: Literal["paired", "reading"]  # V4 N-layout block with pads / V4.1 reading-order span
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightQuant:
    """`quantization_config`: what packed weights of this checkpoint look like; each tensor's own dtype still
    decides."""

    block: tuple[int, int]  # (rows, columns) per scale of an e4m3 matrix
    expert_dtype: str | None  # "fp4", "fp8" or None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A checkpoint folder, understood. `informational` keeps keys that no computation reads, as found."""

    family: str  # of `families.FAMILIES`
    text: TextConfig
    vision: VisionConfig | None
    weights: WeightQuant | None  # None = no quantization_config
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    image_token_id: int | None  # as in config.json, None when absent; `prompt` checks it against the tokenizer
    num_draft_layers: int  # `mtp.*` stages in the checkpoint
    draft: dict[str, Any]  # dspark_* keys, kept for the checkpoint room and later drafting
    informational: dict[str, Any]
