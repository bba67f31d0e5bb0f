"""Small towers for tests: a config, seeded weights by checkpoint name, and modules filled with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from spyglass.batch.images import Grid, pack_images
from spyglass.batch.types import ImageBatch
from spyglass.config.model import VisionConfig
from spyglass.layers.build import BuildContext, weight_slots
from spyglass.ops.declare import Ops
from spyglass.ops.table import bind_ops
from spyglass.params.table import tower_params
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16, F32
from spyglass.quant.packed import WeightSlot
from spyglass.vision.aligner import Aligner
from spyglass.vision.tower import VisionTower

Weights = Mapping[str, NDArray[np.float32]]

SMALL = VisionConfig(
    num_hidden_layers=2,
    hidden_size=128,
    num_attention_heads=2,
    intermediate_size=256,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_tokens=384,
    min_pixels=147456,
    max_wh_ratio=8,
    layout="paired",
)
# No number of this config is that of the release, so code that ignores the config fails.
ODD = VisionConfig(
    num_hidden_layers=3,
    hidden_size=36,
    num_attention_heads=3,
    intermediate_size=50,
    patch_size=4,
    rope_theta=300.0,
    downsample_ratio=2,
    max_tokens=100,
    min_pixels=64,
    max_wh_ratio=None,
    layout="reading",
    norm_eps=0.03,
)


class Vision:
    """A tower and its aligner, loaded."""

    def __init__(
        self,
        config: VisionConfig,
        hidden: int,
        weights: Weights,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        ops: Ops | None = None,
    ) -> None:
        chosen = bind_ops(torch.device(device).type, str(dtype).removeprefix("torch."), "reference")
        build = BuildContext(ops=chosen if ops is None else ops, device=torch.device(device), dtype=dtype)
        build = dataclasses.replace(build, params=tower_params(config, hidden))
        self.config = config
        self.device = device
        self.tower = VisionTower(config, build)
        self.aligner = Aligner(config, build)
        for slot in self.slots():
            values = torch.from_numpy(weights[full_name(slot)])
            assert tuple(values.shape) == slot.shape, slot.name
            slot.put(encode(values, BF16 if dtype == torch.bfloat16 else F32))

    def slots(self) -> list[WeightSlot]:
        return [*weight_slots(self.tower), *weight_slots(self.aligner)]

    def pack(self, patches: list[NDArray[Any]], grids: list[Grid], adapter_ids: list[int] | None = None) -> ImageBatch:
        return pack_images(patches, grids, self.config, device=self.device, adapter_ids=adapter_ids)

    def encode(self, patches: list[NDArray[Any]], grids: list[Grid]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the tower [U, Y] and of the aligner [I, C]."""
        images = self.pack(patches, grids)
        with torch.no_grad():
            rows_UY = self.tower(images)
            return rows_UY, self.aligner(rows_UY, images.grids_I2, images.adapter_I)


def full_name(slot: WeightSlot) -> str:
    """Name of the tensor in a checkpoint."""
    return f"{slot.name}.weight" if slot.kind == "matrix" else slot.name


def weight_shapes(config: VisionConfig, hidden: int) -> dict[str, tuple[int, ...]]:
    """Every vision tensor of a checkpoint, as the specification lists them (spec v4 2.2)."""
    width, inner, ratio = config.hidden_size, config.intermediate_size, config.downsample_ratio
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (width, 3 * config.patch_size**2),
        "vision.patch_embed.proj.bias": (width,),
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (hidden, width * ratio**2),
        "aligner.w1.bias": (hidden,),
        "aligner.w2.weight": (hidden, hidden),
        "aligner.w2.bias": (hidden,),
    }
    for index in range(config.num_hidden_layers):
        block = f"vision.blocks.{index}"
        shapes |= {
            f"{block}.norm1.weight": (width,),
            f"{block}.norm2.weight": (width,),
            f"{block}.attn.wqkv.weight": (3 * width, width),
            f"{block}.attn.wqkv.bias": (3 * width,),
            f"{block}.attn.wo.weight": (width, width),
            f"{block}.attn.wo.bias": (width,),
            f"{block}.mlp.w1.weight": (2 * inner, width),
            f"{block}.mlp.w2.weight": (width, inner),
        }
    return shapes


def random_weights(config: VisionConfig, hidden: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """Values that keep activations near one and make every term count: norms around 1, biases of size 0.3."""
    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in weight_shapes(config, hidden).items():
        if "norm" in name:
            values = 1 + 0.2 * generator.normal(size=shape)
        elif name.endswith("bias"):
            values = 0.3 * generator.normal(size=shape)
        else:
            values = generator.normal(size=shape) * 1.2 / shape[1] ** 0.5
        weights[name] = values.astype(np.float32)
    return weights


def random_pictures(config: VisionConfig, grids: list[Grid], seed: int) -> list[NDArray[np.float32]]:
    """Normalised patches of a picture per grid, already exact in bf16."""
    generator = np.random.default_rng(seed)
    side = config.patch_size
    raw = [generator.uniform(-1, 1, (rows * columns, 3, side, side)).astype(np.float32) for rows, columns in grids]
    return [torch.from_numpy(patches).bfloat16().float().numpy() for patches in raw]


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that is made inside."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def counting(ops: Ops) -> tuple[Ops, dict[str, int]]:
    """The same ops, and how often each was called."""
    calls: dict[str, int] = {}

    def count(name: str, op: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return op(*args, **kwargs)

        return counted

    wrapped = {name: count(name, getattr(ops, name)) for name in ops.chosen}
    return ops.replaced(**wrapped), calls
