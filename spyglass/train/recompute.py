"""Gradient checkpointing: what happens inside a layer is forgotten and computed again when its gradient is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spyglass.batch.types import CacheView
from spyglass.model import VisionLanguageModel


def recompute_layers(model: VisionLanguageModel) -> None:
    """Make every layer of the backbone and block of the tower keep nothing but its input for the backward.

    The steps' `cache.pages` must then be a dict of their own (`train.packing` makes such).
    """
    layers = {layer: index for index, layer in enumerate(model.text.layers)}

    def run_layer(layer: nn.Module, *inputs: Any) -> Any:
        return checkpoint(_on_fresh_pages, layer, layers[layer], *inputs, use_reentrant=False)

    def run_block(block: nn.Module, *inputs: Any) -> Any:
        return checkpoint(block, *inputs, use_reentrant=False)

    model.text.run_layer = run_layer
    if model.vision is not None:
        model.vision.run_block = run_block


def _on_fresh_pages(layer: nn.Module, index: int, *inputs: Any) -> Any:
    """Run a layer on pages that nothing was written to yet.

    Written into the pages of the first run, the graph of the second would stay alive with them until the step ends.
    Layers above that read this one's pages are through with them by then: gradients reach this layer only through them.
    """
    cache = inputs[-1]
    assert isinstance(cache, CacheView) and isinstance(cache.pages, dict)
    for key, pages in cache.pages.items():
        if key[1] == index:
            cache.pages[key] = torch.zeros_like(pages)
    return layer(*inputs)
