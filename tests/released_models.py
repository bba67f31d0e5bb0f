"""The released models cut down to a few layers, on the device "meta": all sizes are real, and nothing has memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from spyglass.checkpoint.load import LoadReport
from spyglass.config.model import ModelConfig
from spyglass.config.read import parse_model_config
from spyglass.layers.build import BuildContext, Loadable
from spyglass.layers.linear import Experts
from spyglass.layers.merged import stack_weights
from spyglass.model import LoadedModel, ModelOptions, VisionLanguageModel
from spyglass.ops.table import bind_ops
from spyglass.quant.packed import Packed, empty_packed
from spyglass.quant.tiles import can_tile
from tests.unit.config.family_configs import flash_vision
from tests.unit.config.v41_released import official

LAYERS = {"v4": 5, "v41": 26}  # with every kind of layer


def released_config(family: str) -> ModelConfig:
    """The first layers of V4-Flash-Vision or V4.1-Flash."""
    config = parse_model_config(flash_vision() if family == "v4" else official(), family)
    return replace(config, text=replace(config.text, layers=config.text.layers[: LAYERS[family]]))


@cache
def released(family: str) -> LoadedModel:
    """The model as it lies on a GPU, in bf16 with packed weights, with Triton's ops where there are some."""
    device, config = torch.device("meta"), released_config(family)
    build = BuildContext(ops=bind_ops("cuda", "bfloat16"), device=device, dtype=torch.bfloat16)
    model = VisionLanguageModel(config, ModelOptions(build=build, numerics="reference"))
    for module in model.modules():
        if isinstance(module, Experts):
            for name in ("w1", "w3", "w2"):
                param = model.params[f"{module.name}.0.{name}"]
                stack = empty_packed(param.format, (module.num_experts, *param.shape), device)
                module.put_stack(name, replace(stack, tiled=can_tile(stack)))
        elif isinstance(module, Loadable) and module is not model:
            for slot in module.slots():
                param = model.params[slot.name]
                slot.put(
                    Packed(param.format, torch.zeros(slot.shape, dtype=torch.int32), None, slot.shape)
                    if param.kind == "index"  # its values are checked
                    else empty_packed(param.format, slot.shape, device)
                )
    stack_weights(model)
    report = LoadReport(counts={}, skipped={}, ignored_files=(), nbytes=0, seconds=0.0)
    return LoadedModel(
        model=model, config=config, device=device, dtype=torch.bfloat16, numerics="reference", report=report
    )
