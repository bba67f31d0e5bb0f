"""The spelling that transformers uses when it saves a V4 model: the schedule as words, both rotations in one object.

`layer_types` with `compress_rates` stands for `compress_ratios`, `mlp_layer_types` for `num_hash_layers`, and
`rope_parameters` {main, compress} for `rope_theta`, `compress_rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

from dataclasses import replace

from spyglass.config.fields import Fields

WINDOW_ONLY = "sliding_attention"
HASHED, SCORED = "hash_moe", "moe"
# What `rope_parameters.compress` repeats and no computation reads.
_REPEATED = ("rope_theta", "partial_rotary_factor")


def is_saved_spelling(fields: Fields) -> bool:
    """Whether the file has transformers' schedule and no official one."""
    return fields.values.get("compress_ratios") is None and fields.values.get("layer_types") is not None


def official_spelling(fields: Fields) -> Fields:
    """The same file with official field names.

    Raises:
        ConfigError: a word of the schedule is unknown, a list has another length than the layers, hashed layers are not
            the first ones, or a rotation is incomplete.
    """
    fields.fixed("mlp_bias", False)
    num_layers = fields.integer("num_hidden_layers")
    rope = fields.section("rope_parameters")
    near, far = rope.section("main"), rope.section("compress")
    near.fixed("rope_type", "default")
    values = {
        **fields.values,
        "compress_ratios": _ratios(fields, num_layers),
        "num_hash_layers": _num_hashed(fields, num_layers),
        "rope_theta": near.number("rope_theta", above=1),
        "compress_rope_theta": far.number("rope_theta", above=1),
        "rope_scaling": {key: value for key, value in far.values.items() if key not in _REPEATED},
    }
    return replace(fields, values=values)


def _ratios(fields: Fields, num_layers: int) -> list[int]:
    rates = fields.section("compress_rates")
    words = fields.words("layer_types", num_layers, (WINDOW_ONLY, *rates.values), limit="num_hidden_layers")
    return [0 if word == WINDOW_ONLY else rates.integer(word) for word in words]


def _num_hashed(fields: Fields, num_layers: int) -> int:
    words = fields.words("mlp_layer_types", num_layers, (HASHED, SCORED), limit="num_hidden_layers")
    count = words.count(HASHED)
    if HASHED in words[count:]:
        raise fields.error("mlp_layer_types", f"{HASHED!r} for the first layers only")
    return count
