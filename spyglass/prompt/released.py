"""Picture settings of the released checkpoints, for planning without a checkpoint folder (spec v4 1.1, v41 1.1)."""

from __future__ import annotations

from spyglass.config.model import VisionConfig

V4_VISION = VisionConfig(
    num_hidden_layers=32,
    hidden_size=1024,
    num_attention_heads=16,
    intermediate_size=2816,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_tokens=384,
    min_pixels=147456,
    max_wh_ratio=8,
    layout="paired",
)
V41_VISION = VisionConfig(
    num_hidden_layers=32,
    hidden_size=1024,
    num_attention_heads=16,
    intermediate_size=2816,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_tokens=1024,
    min_pixels=295936,
    max_wh_ratio=None,
    layout="reading",
)
