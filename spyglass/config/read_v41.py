"""The nested V4.1 dialect (spec v41 1.1) and the reference code's flat one (1.2).

A layer's role follows from four lists (spec 3.1): its ratio, the KV source and the index source nearest below it, and
whether it lies above the candidate source. Nothing is guessed; lists that contradict one another are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from spyglass.config import read_v4
from spyglass.config.contradictions import refuse_contradictions, refuse_repeated, refuse_vision_contradictions
from spyglass.config.fields import Fields
from spyglass.config.model import (
    CandidatePlan,
    CompressorPlan,
    EngramConfig,
    LayerPlan,
    ModelConfig,
    RopeSpec,
    Rounding,
    VisionConfig,
    WeightQuant,
    YarnScaling,
)
from spyglass.families import V41
from spyglass.quant.formats import FakeQuant

RATIOS = (0, 1, 2)
MAX_ENGRAM_HEADS = 1024  # each has a prime of its own, searched for when tables open
SMALLEST_SPAN = 4  # START, one image cell, NEWLINE, END
REFERENCE_EPS = 1e-20

# Our name -> the reference code's name (spec v41 1.2); names that agree are not listed.
REFERENCE_NAMES = {
    **read_v4.REFERENCE_NAMES,
    "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers",
    "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id",
}
OFFICIAL = read_v4.OFFICIAL
REFERENCE = read_v4.Defaults(eps=REFERENCE_EPS, bos_token_id=0, eos_token_id=1)


def read_official(fields: Fields) -> ModelConfig:
    """The released nested file.

    Raises:
        ConfigError: a needed field is missing or malformed, fields contradict one another, or something is asked for
            that is not implemented.
    """
    text = fields.section("text_config")
    text.optional_choice("model_type", (f"{V41.name}_text",))
    text, yarn = _rotation(text)
    vision = None
    if fields.get("vision_config") is not None:
        section = fields.section("vision_config")
        section.optional_choice("model_type", (f"{V41.name}_vision",))
        vision = read_v4.read_vision(section, V41, smallest=SMALLEST_SPAN)
    fields.fixed("tie_word_embeddings", False)
    config = _model(fields, text, yarn, vision, read_v4.official_weights(fields, None), OFFICIAL)
    refuse_contradictions(fields, config.text)
    refuse_repeated(fields, text)
    if vision is None:
        fields.fixed("vision_n_layers", 0)
    else:
        refuse_vision_contradictions(section, vision, config.text)
        refuse_repeated(fields, section, {name: ours for ours, name in read_v4.VISION_NAMES.items()})
    return config


def read_reference(fields: Fields) -> ModelConfig:
    """The reference code's own flat file, with its short names and defaults.

    Raises:
        ConfigError: as `read_official`.
    """
    tower = replace(fields, written=read_v4.VISION_NAMES)
    vision = None
    if tower.integer("num_hidden_layers", default=0, low=0):
        vision = read_v4.read_vision(tower, V41, smallest=SMALLEST_SPAN)
    weights = read_v4.reference_weights(fields, block=(32, 32))
    return _model(fields, fields, read_v4.read_yarn(fields, check_kind=False), vision, weights, REFERENCE)


def _rotation(text: Fields) -> tuple[Fields, YarnScaling]:
    """YaRN numbers, wherever they are, and the section with both bases at their official place.

    The release writes `rope_scaling`; transformers moves it to `rope_parameters`, adds `rope_theta`, and may split it
    by kind of layer into `main` and `compress` (spec v41 1.1, caution).
    """
    name = "rope_scaling" if text.get("rope_scaling") is not None else "rope_parameters"
    scaling, values = text.section(name), dict(text.values)
    text.get("rope_parameters")
    main = scaling
    if scaling.get("main") is not None:
        main, scaling = scaling.section("main"), scaling.section("compress")
        _agree(values, text, "compress_rope_theta", scaling)
    _agree(values, text, "rope_theta", main)
    scaling.get("rope_theta")
    scaling.get("partial_rotary_factor")
    yarn = read_v4.read_yarn(scaling, check_kind=True)
    scaling.refuse_unseen()
    return replace(text, values=values), yarn


def _agree(values: dict[str, object], text: Fields, name: str, section: Fields) -> None:
    """Take over a base that `section` holds as `rope_theta`; two different ones are refused."""
    value = section.get("rope_theta")
    if value is None:
        return
    if text.get(name) is not None and text.get(name) != value:
        raise section.error("rope_theta", f"the same base as {text.prefix}{name}, {text.get(name)}")
    values[name] = value


def _model(
    fields: Fields,
    text: Fields,
    yarn: YarnScaling,
    vision: VisionConfig | None,
    weights: WeightQuant | None,
    defaults: read_v4.Defaults,
) -> ModelConfig:
    """`fields` has the ids, `text` the backbone; in the flat dialect they are the same object."""
    read_v4.refuse_other_mathematics(text)
    text.fixed("gate_temp", 1)
    ratios = read_v4.schedule(text, RATIOS)
    head_dim, rope_dim = read_v4.head_dims(text)
    candidate_source = text.optional_integer("candidate_source_layer_id", high=len(ratios) - 1)
    candidates = None
    if candidate_source is not None:
        num_blocks = text.integer("candidate_topk_blocks")
        candidates = CandidatePlan(num_blocks=num_blocks, block_size=text.integer("candidate_block_size"))
    engram = _engram(text, len(ratios))
    wiring = read_v4.Wiring(
        family=V41,
        layers=_layers(text, yarn, ratios, rope_dim, candidate_source, engram),
        rounding=_rounding(head_dim),
        index_head_dim=text.integer("index_head_dim", low=rope_dim),
        engram=engram,
        candidates=candidates,
    )
    backbone = read_v4.read_text(text, wiring, defaults)
    vocab, extra = backbone.vocab_size, len(text.integers("compress_ratios")) - len(ratios)
    config = ModelConfig(
        family=V41.name,
        text=backbone,
        vision=vision,
        weights=weights,
        bos_token_id=fields.integer("bos_token_id", default=defaults.bos_token_id, low=0, high=vocab - 1),
        eos_token_ids=read_v4.end_ids(fields, defaults, vocab),
        pad_token_id=fields.optional_integer("pad_token_id", high=vocab - 1),
        image_token_id=fields.optional_integer("image_token_id", high=vocab - 1),
        num_draft_layers=text.integer("num_nextn_predict_layers", default=extra, low=0),
        draft={key: value for key, value in text.values.items() if key.startswith(read_v4.DRAFT_PREFIX)},
        informational={},
    )
    refuse_contradictions(text, backbone)
    rest = fields.unseen() if fields is text else {**fields.unseen(), **text.unseen()}
    named = {key: value for key, value in rest.items() if not key.startswith(read_v4.DRAFT_PREFIX)}
    return replace(config, informational=named)


def _layers(
    text: Fields,
    yarn: YarnScaling,
    ratios: tuple[int, ...],
    rope_dim: int,
    candidate_source: int | None,
    engram: EngramConfig | None,
) -> tuple[LayerPlan, ...]:
    """Each layer's role (spec v41 3.1): a ratio above 0 reads the nearest KV and index source at or below it."""
    near = RopeSpec(theta=text.number("rope_theta", above=1), dim=rope_dim, yarn=None)
    far = RopeSpec(theta=text.number("compress_rope_theta", above=1), dim=rope_dim, yarn=yarn)
    kv_from = _sources(text, "kv_source_layer_ids", ratios)
    index_from = _sources(text, "index_source_layer_ids", ratios)
    for layer, source in kv_from.items():
        if layer == source and index_from[layer] != layer:
            raise text.error("index_source_layer_ids", f"all KV sources too; {layer} is missing")
    limited = _limited(text, candidate_source, kv_from, index_from)
    return tuple(
        LayerPlan(
            index=index,
            ratio=ratio,
            rope=far if ratio else near,
            compressor=_compressor(ratio) if kv_from.get(index) == index else None,
            kv_from=kv_from.get(index),
            index_from=index_from.get(index),
            index_keys_from=kv_from[index] if index_from.get(index) == index else None,
            candidates_from=candidate_source if index in limited else None,
            router="topk",
            engram=engram is not None and index in engram.layers,
            makes_candidates=index == candidate_source,
        )
        for index, ratio in enumerate(ratios)
    )


def _sources(text: Fields, name: str, ratios: tuple[int, ...]) -> dict[int, int]:
    """For every layer with a ratio above 0 the nearest source at or below it, which must have the same ratio."""
    sources = text.integers(name)
    if list(sources) != sorted(set(sources)) or any(s >= len(ratios) or ratios[s] == 0 for s in sources):
        raise text.error(name, f"ascending layers with a ratio above 0, all below {len(ratios)}")
    found: dict[int, int] = {}
    for index, ratio in enumerate(ratios):
        below = [source for source in sources if source <= index]
        if ratio == 0:
            continue
        if not below or ratios[below[-1]] != ratio:
            raise text.error(name, f"a source of ratio {ratio} at or below layer {index}")
        found[index] = below[-1]
    return found


def _limited(
    text: Fields, candidate_source: int | None, kv_from: Mapping[int, int], index_from: Mapping[int, int]
) -> set[int]:
    """Index sources above the candidate source; its candidates are entries of one pool, so they must score the same."""
    if candidate_source is None:
        return set()
    name = "candidate_source_layer_id"
    if index_from.get(candidate_source) != candidate_source:
        raise text.error(name, "one of index_source_layer_ids")
    limited = {layer for layer, source in index_from.items() if layer == source and layer > candidate_source}
    for layer in sorted(limited):
        if kv_from[layer] != kv_from[candidate_source]:
            raise text.error(name, f"a layer whose KV source is that of index source {layer}, {kv_from[layer]}")
    return limited


def _compressor(ratio: int) -> CompressorPlan:
    """Spec v41 4.5: no overlap, no positional bias; a group of one needs no gate. Index keys come from the latent."""
    return CompressorPlan(ratio=ratio, overlap=False, positional_bias=False, gated=ratio > 1, index_keys="latent")


def _rounding(head_dim: int) -> Rounding:
    """A8, F4E and F4U of spec v41 4.1, over whole rows and after rotation."""
    rows = FakeQuant(element="e4m3", block=32)
    return Rounding(
        linear=rows,
        window=rows,
        pool=FakeQuant(element="e2m1", block=16, scale="e4m3"),
        index=FakeQuant(element="e2m1", block=32),
        hadamard=False,
        kv_dims=head_dim,
        rope_dims_bf16=False,
    )


def _engram(text: Fields, num_layers: int) -> EngramConfig | None:
    """Spec v41 5; an absent or empty layer list means none."""
    layers = text.integers("engram_layer_ids") if text.get("engram_layer_ids") is not None else ()
    if not layers:
        return None
    if list(layers) != sorted(set(layers)) or layers[-1] >= num_layers:
        raise text.error("engram_layer_ids", f"ascending layers below {num_layers}")
    num_rows = text.integers("engram_num_embeddings", low=1)
    if len(num_rows) != len(layers):
        raise text.error("engram_num_embeddings", f"one table size for each of the {len(layers)} engram layers")
    vocab = text.integer("vocab_size", low=2)
    return EngramConfig(
        layers=layers,
        num_rows=num_rows,
        max_ngram=text.integer("engram_max_ngram_size", low=2, high=16),
        prime_above=text.integer("engram_vocab_size", low=2),
        num_heads=text.integer("engram_n_heads", high=MAX_ENGRAM_HEADS),
        head_dim=text.integer("engram_head_dim"),
        pad_token_id=text.integer("engram_pad_token_id", low=0, high=vocab - 1),
        num_classes=text.integer("engram_compressed_vocab_size", high=vocab),
    )
