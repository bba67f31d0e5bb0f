"""The flat V4 dialect (spec v4 1): `config.json` of the released models, or the reference code's short names (1.4).

One schedule rule: layer i does what `compress_ratios[i]` says (0 = window only, 4 = overlapping pools chosen by an
indexer, 128 = plain pools, all attended), and the first `num_hash_layers` layers route by token id. Nothing is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from spyglass.config.contradictions import refuse_contradictions
from spyglass.config.fields import Fields
from spyglass.config.model import (
    CandidatePlan,
    CompressorPlan,
    EngramConfig,
    LayerPlan,
    ModelConfig,
    RopeSpec,
    Rounding,
    TextConfig,
    VisionConfig,
    WeightQuant,
    YarnScaling,
)
from spyglass.config.saved_v4 import is_saved_spelling, official_spelling
from spyglass.families import V4, Family
from spyglass.quant.formats import FakeQuant

POOLED_ALL = 128  # ratio whose pools are all attended
POOLED_CHOSEN = 4  # ratio whose pools overlap and are chosen by an indexer
DEFAULT_MAX_POSITION = 1 << 20
REFERENCE_EPS = 1e-6  # what the reference code assumes for norm_eps and hc_eps when its short config leaves them out
# Bounds of what is built or repeated one by one: far above any model, far below what would keep a machine busy.
MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 17  # of all layers together
MAX_SINKHORN_ROUNDS = 1000
MAX_WINDOW = 1 << 20
MAX_IMAGE_TOKENS = 1 << 16
SMALLEST_BLOCK = 9  # 3 leading pads, START, a 2x2 body, END: the least that one image can take (spec v4 9.5)

# Our name -> the reference code's name (spec v4 1.4); names that agree are not listed.
REFERENCE_NAMES = {
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_hash_layers": "n_hash_layers",
    "num_attention_heads": "n_heads",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "qk_rope_head_dim": "rope_head_dim",
    "sliding_window": "window_size",
    "rms_norm_eps": "norm_eps",
    "num_nextn_predict_layers": "n_mtp_layers",
    "factor": "rope_factor",
    "original_max_position_embeddings": "original_seq_len",
}
# Our name of a tower's field -> its name in V4's files and in the reference code's V4.1 file.
VISION_NAMES = {
    "num_hidden_layers": "vision_n_layers",
    "hidden_size": "vision_dim",
    "num_attention_heads": "vision_n_heads",
    "intermediate_size": "vision_inter_dim",
    "patch_size": "vision_patch_size",
    "rope_theta": "vision_rope_theta",
    "downsample_ratio": "vision_downsample_ratio",
    "max_image_tokens": "vision_max_n_token",
    "min_pixels": "vision_min_pixels",
    "max_wh_ratio": "vision_max_wh_ratio",
}
DRAFT_PREFIX = "dspark_"
EXPERT_DTYPES = ("fp4", "fp8", "bf16")
SCALE_FORMATS = ("ue8m0", "fp32")  # base models keep fp32 scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What may be left out: the official file writes all a computation needs, the reference's own file does not."""

    eps: float | None
    bos_token_id: int | None
    eos_token_id: int | None


OFFICIAL = Defaults(eps=None, bos_token_id=None, eos_token_id=None)
REFERENCE = Defaults(eps=REFERENCE_EPS, bos_token_id=0, eos_token_id=1)


def read_official(fields: Fields) -> ModelConfig:
    """The released flat file (spec v4 1.1), also as transformers saves it.

    Raises:
        ConfigError: a needed field is missing or malformed, fields contradict one another, or something is asked for
            that is not implemented.
    """
    if is_saved_spelling(fields):
        fields = official_spelling(fields)
    scaling = fields.section("rope_scaling")
    yarn = read_yarn(scaling, check_kind=True)
    scaling.refuse_unseen()
    expert_dtype = fields.optional_choice("expert_dtype", EXPERT_DTYPES)
    return _model(fields, yarn, OFFICIAL, official_weights(fields, expert_dtype))


def read_reference(fields: Fields) -> ModelConfig:
    """The reference code's own file, with its short names and its defaults (spec v4 1.4).

    Raises:
        ConfigError: as `read_official`.
    """
    return _model(fields, read_yarn(fields, check_kind=False), REFERENCE, reference_weights(fields))


def _model(fields: Fields, yarn: YarnScaling, defaults: Defaults, weights: WeightQuant | None) -> ModelConfig:
    refuse_other_mathematics(fields)
    ratios = schedule(fields, (0, POOLED_CHOSEN, POOLED_ALL))
    head_dim, rope_dim = head_dims(fields)
    wiring = Wiring(
        family=V4,
        layers=_layers(fields, yarn, ratios, rope_dim),
        rounding=_rounding(head_dim - rope_dim),
        index_head_dim=_index_dim(fields, rope_dim),
    )
    text = read_text(fields, wiring, defaults)
    extra = len(fields.integers("compress_ratios")) - len(ratios)
    vocab = text.vocab_size
    config = ModelConfig(
        family=V4.name,
        text=text,
        vision=_vision(fields),
        weights=weights,
        bos_token_id=fields.integer(
            "bos_token_id", default=defaults.bos_token_id, low=0, high=vocab - 1, limit="vocab_size"
        ),
        eos_token_ids=end_ids(fields, defaults, vocab),
        pad_token_id=fields.optional_integer("pad_token_id", high=vocab - 1, limit="vocab_size"),
        image_token_id=fields.optional_integer("image_token_id", high=vocab - 1, limit="vocab_size"),
        num_draft_layers=fields.integer("num_nextn_predict_layers", default=extra, low=0),
        draft={key: value for key, value in fields.values.items() if key.startswith(DRAFT_PREFIX)},
        informational={},
    )
    refuse_contradictions(fields, text)
    unread = {key: value for key, value in fields.unseen().items() if not key.startswith(DRAFT_PREFIX)}
    return replace(config, informational=unread)


def refuse_other_mathematics(fields: Fields) -> None:
    """Fields with one implemented value: absent is fine, another value would be computed wrongly."""
    fields.fixed("num_key_value_heads", 1)
    fields.fixed("hidden_act", "silu")
    fields.fixed("scoring_func", "sqrtsoftplus")
    fields.fixed("topk_method", "noaux_tc")
    fields.fixed("norm_topk_prob", True)
    fields.fixed("attention_bias", False)
    fields.fixed("tie_word_embeddings", False)


def schedule(fields: Fields, known: tuple[int, ...]) -> tuple[int, ...]:
    """The ratio of each layer, one of `known`; entries behind the last layer belong to draft stages."""
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    ratios = fields.integers("compress_ratios")
    if len(ratios) < num_layers:
        layers = fields.spelling("num_hidden_layers")
        raise fields.error("compress_ratios", f"{layers} = {num_layers} entries, found {len(ratios)}; none is assumed")
    for index, ratio in enumerate(ratios[:num_layers]):
        if ratio not in known:
            expected = ", ".join(map(str, known[:-1])) + f" or {known[-1]}"
            raise fields.error("compress_ratios", f"{expected} for every layer, layer {index} has {ratio}")
    return ratios[:num_layers]


def read_yarn(fields: Fields, *, check_kind: bool) -> YarnScaling:
    """YaRN numbers, from their own object or the flat reference file; there is no attention temperature (spec 4.3)."""
    if check_kind:
        newer = fields.get("type") is None and fields.get("rope_type") is not None
        fields.choice("rope_type" if newer else "type", ("yarn",))
        fields.fixed("rope_type", "yarn")
        fields.fixed("attention_factor", 1)
    beta_slow = fields.number("beta_slow")
    return YarnScaling(
        factor=fields.number("factor", low=1),
        original_max_position=fields.integer("original_max_position_embeddings"),
        beta_fast=fields.number("beta_fast", low=beta_slow, limit="beta_slow"),
        beta_slow=beta_slow,
    )


def head_dims(fields: Fields) -> tuple[int, int]:
    """`head_dim` and its rotated part."""
    head_dim = fields.integer("head_dim", low=2)
    rope_dim = fields.integer("qk_rope_head_dim", low=2, high=head_dim - 1, limit="head_dim")
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "an even number: channels are rotated in pairs")
    return head_dim, rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """What a family decides about its backbone beyond the numbers both write alike."""

    family: Family
    layers: tuple[LayerPlan, ...]
    rounding: Rounding
    index_head_dim: int
    engram: EngramConfig | None = None
    candidates: CandidatePlan | None = None


def read_text(fields: Fields, wiring: Wiring, defaults: Defaults) -> TextConfig:
    """The backbone's numbers, which both families write under the same names."""
    num_heads = fields.integer("num_attention_heads")
    head_dim, _ = head_dims(fields)
    num_groups = fields.integer("o_groups")
    if num_heads % num_groups:
        raise fields.error("o_groups", f"a divisor of {fields.spelling('num_attention_heads')} {num_heads}")
    most_experts = MAX_EXPERTS // len(wiring.layers)
    num_experts = fields.integer("n_routed_experts", high=most_experts, limit="num_hidden_layers")
    return TextConfig(
        vocab_size=fields.integer("vocab_size", low=2),
        hidden_size=fields.integer("hidden_size"),
        num_attention_heads=num_heads,
        head_dim=head_dim,
        q_lora_rank=fields.integer("q_lora_rank"),
        o_groups=num_groups,
        o_lora_rank=fields.integer("o_lora_rank"),
        sliding_window=fields.integer("sliding_window", high=MAX_WINDOW),
        index_n_heads=fields.integer("index_n_heads"),
        index_head_dim=wiring.index_head_dim,
        index_topk=fields.integer("index_topk"),
        n_routed_experts=num_experts,
        n_shared_experts=fields.integer("n_shared_experts", high=1),
        num_experts_per_tok=fields.integer("num_experts_per_tok", high=num_experts, limit="n_routed_experts"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        swiglu_limit=fields.number("swiglu_limit"),
        hc_mult=fields.integer("hc_mult"),
        hc_sinkhorn_iters=fields.integer("hc_sinkhorn_iters", high=MAX_SINKHORN_ROUNDS),
        hc_eps=fields.number("hc_eps", default=defaults.eps),
        rms_norm_eps=fields.number("rms_norm_eps", default=defaults.eps),
        q_head_norm=wiring.family.q_head_norm,
        shifted_hyper=wiring.family.shifted_hyper,
        max_position_embeddings=fields.integer("max_position_embeddings", default=DEFAULT_MAX_POSITION),
        layers=wiring.layers,
        reference_rounding=wiring.rounding,
        engram=wiring.engram,
        candidates=wiring.candidates,
    )


def _index_dim(fields: Fields, rope_dim: int) -> int:
    dim = fields.integer("index_head_dim", low=rope_dim, limit="qk_rope_head_dim")
    if dim & (dim - 1):
        raise fields.error("index_head_dim", "a power of two: index vectors pass a Hadamard rotation")
    return dim


def _layers(fields: Fields, yarn: YarnScaling, ratios: tuple[int, ...], rope_dim: int) -> tuple[LayerPlan, ...]:
    num_hash = fields.integer("num_hash_layers", low=0, high=len(ratios), limit="num_hidden_layers")
    near = RopeSpec(theta=fields.number("rope_theta", above=1), dim=rope_dim, yarn=None)
    far = RopeSpec(theta=fields.number("compress_rope_theta", above=1), dim=rope_dim, yarn=yarn)
    compressors = {0: None, POOLED_CHOSEN: _compressor(POOLED_CHOSEN), POOLED_ALL: _compressor(POOLED_ALL)}
    return tuple(
        LayerPlan(
            index=index,
            ratio=ratio,
            rope=far if ratio else near,
            compressor=compressors[ratio],
            kv_from=index if ratio else None,
            index_from=index if ratio == POOLED_CHOSEN else None,
            index_keys_from=index if ratio == POOLED_CHOSEN else None,
            candidates_from=None,
            router="hash" if index < num_hash else "topk",
        )
        for index, ratio in enumerate(ratios)
    )


def _compressor(ratio: int) -> CompressorPlan:
    """Spec v4 5.1: ratio 4 pools two groups and has its own small compressor for index keys."""
    chosen = ratio == POOLED_CHOSEN
    return CompressorPlan(
        ratio=ratio, overlap=chosen, positional_bias=True, gated=True, index_keys="compressor" if chosen else None
    )


def _rounding(plain_dims: int) -> Rounding:
    """Where the released V4 models round on purpose (spec v4 2.5, 4.2, 5.5), whatever the weights are stored as."""
    rows = FakeQuant(element="e4m3", block=64)
    return Rounding(
        linear=FakeQuant(element="e4m3", block=128),
        window=rows,
        pool=rows,
        index=FakeQuant(element="e2m1", block=32),
        hadamard=True,
        kv_dims=plain_dims,
        rope_dims_bf16=True,
    )


def _vision(fields: Fields) -> VisionConfig | None:
    """The image tower; `vision_n_layers` above zero is the only sign of one (spec v4 1.2)."""
    tower = replace(fields, written=VISION_NAMES)
    if tower.integer("num_hidden_layers", default=0, low=0, high=MAX_LAYERS) == 0:
        return None
    if tower.spelling("max_wh_ratio") not in fields.values:
        raise tower.error("max_wh_ratio", "a number of at least 1, or null for no limit")
    return read_vision(tower, V4, smallest=SMALLEST_BLOCK)


def read_vision(tower: Fields, family: Family, *, smallest: int) -> VisionConfig:
    """The numbers of a tower; `smallest`: tokens of the shortest block that an image can take."""
    width, num_heads = tower.integer("hidden_size"), tower.integer("num_attention_heads")
    if width % (4 * num_heads):
        expected = f"a divisor of the width {width} that leaves a head dimension divisible by 4 (2-D rotation)"
        raise tower.error("num_attention_heads", expected)
    return VisionConfig(
        num_hidden_layers=tower.integer("num_hidden_layers", high=MAX_LAYERS),
        hidden_size=width,
        num_attention_heads=num_heads,
        intermediate_size=tower.integer("intermediate_size"),
        patch_size=tower.integer("patch_size"),
        rope_theta=tower.number("rope_theta", above=1),
        downsample_ratio=tower.integer("downsample_ratio"),
        max_tokens=tower.integer("max_image_tokens", low=smallest, high=MAX_IMAGE_TOKENS),
        min_pixels=tower.integer("min_pixels", low=0),
        max_wh_ratio=tower.optional_number("max_wh_ratio", low=1),
        layout=family.image_layout,
    )


def official_weights(fields: Fields, expert_dtype: str | None) -> WeightQuant | None:
    """`quantization_config`; each tensor's own dtype decides what it is, this says how e4m3 scales lie.

    It may name the experts' format itself (V4.1).
    """
    if fields.get("quantization_config") is None:
        return None
    quant = fields.section("quantization_config")
    quant.choice("quant_method", ("fp8",))
    quant.fixed("fmt", "e4m3")
    quant.fixed("activation_scheme", "dynamic")
    quant.optional_choice("scale_fmt", SCALE_FORMATS)
    block = quant.integers("weight_block_size", low=1)
    if len(block) != 2:
        raise quant.error("weight_block_size", "two integers, rows and columns per scale")
    return WeightQuant(
        block=(block[0], block[1]), expert_dtype=quant.optional_choice("expert_dtype", EXPERT_DTYPES) or expert_dtype
    )


def reference_weights(fields: Fields, block: tuple[int, int] = (128, 128)) -> WeightQuant | None:
    """The reference file says only that matrices are fp8; its blocks are fixed by code (V4: 128 x 128)."""
    expert_dtype = fields.optional_choice("expert_dtype", EXPERT_DTYPES)
    fields.optional_choice("scale_fmt", SCALE_FORMATS)
    if fields.choice("dtype", ("fp8", "bf16"), default="bf16") == "bf16":
        return None
    return WeightQuant(block=block, expert_dtype=expert_dtype)


def end_ids(fields: Fields, defaults: Defaults, vocab_size: int) -> tuple[int, ...]:
    """`eos_token_id`: one id or a list of them."""
    if isinstance(fields.get("eos_token_id"), list):
        ids = fields.integers("eos_token_id")
        if not ids or max(ids) >= vocab_size:
            raise fields.error(
                "eos_token_id", f"at least one id, all below {fields.spelling('vocab_size')} {vocab_size}"
            )
        return ids
    return (
        fields.integer("eos_token_id", default=defaults.eos_token_id, low=0, high=vocab_size - 1, limit="vocab_size"),
    )
