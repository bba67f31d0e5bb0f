"""The image encoder: pre-norm transformer blocks over patches, all images of a call packed into one row axis.

x = patches · Wᵀ + b; per block x += attention(norm1(x)), x += mlp(norm2(x)); a final norm. No class token and no
absolute position: a 2-D rotary embedding turns q and k by (row, column) of the patch in its own image, and attention
never leaves the image (spec v4 9.3, v41 7.4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from spyglass.batch.images import Grid, offsets
from spyglass.batch.types import ImageBatch
from spyglass.config.model import VisionConfig
from spyglass.layers.build import BuildContext, RunPart, run_part
from spyglass.layers.linear import Linear
from spyglass.layers.norm import RMSNorm
from spyglass.layers.rope import rope_frequencies
from spyglass.vision.pixels import normalised, pixel_table


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """What every block needs to know about the rows: rotary tables fp32 [U, D / 2], image borders, adapters.

    `offsets` are the borders on the host; `adapter_U` None = no adapters.
    """

    cos_UR: torch.Tensor
    sin_UR: torch.Tensor
    cu_seqlens_I1: torch.Tensor
    offsets: tuple[int, ...]
    adapter_U: torch.Tensor | None


def patch_positions(grids: Sequence[Grid]) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column (int64 [U], host) of every packed patch in its own image, counted from 0."""
    rows = [np.repeat(np.arange(height), width) for height, width in grids]
    columns = [np.tile(np.arange(width), height) for height, width in grids]
    empty = np.empty(0, np.int64)
    return torch.from_numpy(np.concatenate([empty, *rows])), torch.from_numpy(np.concatenate([empty, *columns]))


def rotary_tables(grids: Sequence[Grid], theta: float, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, fp32 [U, head_dim / 2] on the host: the first half turns by row, the second by column.

    Angles are fp32(position) · fp32(theta^(-2i / (head_dim / 2))), i < head_dim / 4 (spec v4 9.3). They are made on the
    host, once per position and not per patch, so that every device turns by the same bits.
    """
    longest = max((max(grid) for grid in grids), default=0)
    cos_PR, sin_PR = angle_tables(longest, theta, head_dim)
    row_U, column_U = patch_positions(grids)
    return torch.cat([cos_PR[row_U], cos_PR[column_U]], dim=1), torch.cat([sin_PR[row_U], sin_PR[column_U]], dim=1)


def angle_tables(positions: int, theta: float, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of positions 0, 1, ...: fp32 [positions, head_dim / 4], host; rows and columns alike."""
    angle_PR = torch.arange(positions).float()[:, None] * rope_frequencies(theta, head_dim // 2, None)
    return angle_PR.cos(), angle_PR.sin()


class VisionAttention(nn.Module):
    """Full attention among the patches of each image."""

    def __init__(self, name: str, vision: VisionConfig, build: BuildContext) -> None:
        super().__init__()
        self.heads = vision.num_attention_heads
        self.wqkv = Linear(build, f"{name}.wqkv")
        self.wo = Linear(build, f"{name}.wo")
        self._rope = build.ops.rope_half
        self._attention = build.ops.vit_attention

    def forward(self, x_UY: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        qkv = self.wqkv(x_UY, rows.adapter_U).unflatten(-1, (3, self.heads, -1))
        turning, v_U1HD = qkv.split([2, 1], dim=1)  # whose gradients are joined in one pass
        turned = self._rope(turning.flatten(1, 2), rows.cos_UR, rows.sin_UR)  # q and k in one pass
        q_UHD, k_UHD = turned.chunk(2, dim=1)
        scale = float(q_UHD.shape[-1]) ** -0.5
        out_UHD = self._attention(
            q_UHD, k_UHD, v_U1HD.squeeze(1), rows.cu_seqlens_I1, offsets=rows.offsets, scale=scale
        )
        out: torch.Tensor = self.wo(out_UHD.flatten(1), rows.adapter_U)
        return out


class VisionMlp(nn.Module):
    """w2(silu(gate) · up); gate and up are the two halves of w1, and silu is rounded before the product."""

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__()
        self.w1 = Linear(build, f"{name}.w1")
        self.w2 = Linear(build, f"{name}.w2")
        self._gate = build.ops.silu_mul

    def forward(self, x_UY: torch.Tensor, adapter_U: torch.Tensor | None) -> torch.Tensor:
        out: torch.Tensor = self.w2(self._gate(self.w1(x_UY, adapter_U)), adapter_U)
        return out


class VisionBlock(nn.Module):
    """One pre-norm block."""

    def __init__(self, name: str, vision: VisionConfig, build: BuildContext) -> None:
        super().__init__()
        self.norm1 = RMSNorm(build, f"{name}.norm1", vision.norm_eps)
        self.attn = VisionAttention(f"{name}.attn", vision, build)
        self.norm2 = RMSNorm(build, f"{name}.norm2", vision.norm_eps)
        self.mlp = VisionMlp(build, f"{name}.mlp")

    def forward(self, x_UY: torch.Tensor, rows: PackedRows) -> torch.Tensor:
        x_UY = x_UY + self.attn(self.norm1(x_UY), rows)
        out: torch.Tensor = x_UY + self.mlp(self.norm2(x_UY), rows.adapter_U)
        return out


class VisionTower(nn.Module):
    """Patches of all images to one row per patch."""

    def __init__(self, vision: VisionConfig, build: BuildContext) -> None:
        super().__init__()
        self.vision = vision
        self.patch_embed = Linear(build, "vision.patch_embed.proj")
        self.blocks = nn.ModuleList(
            VisionBlock(f"vision.blocks.{index}", vision, build) for index in range(vision.num_hidden_layers)
        )
        self.norm = RMSNorm(build, "vision.norm", vision.norm_eps)
        self.run_block: RunPart = run_part
        self._dtype = build.dtype
        self._pixels = pixel_table().to(build.device, build.dtype)

    def forward(self, images: ImageBatch) -> torch.Tensor:
        """Rows [U, Y] of the activation dtype, images in order, patches row by row.

        Every op runs once per layer, however many images there are.
        """
        return self.encode(self.patch_values(images.patches_U), self._rows(images), images.between_layers)

    def patch_values(self, patches_U: torch.Tensor) -> torch.Tensor:
        """Patches [U, 3 p p] as the embedding reads them: normalised, of the activation dtype."""
        return normalised(patches_U, self._dtype, self._pixels).flatten(1)

    def encode(
        self, patches_UF: torch.Tensor, rows: PackedRows, between_layers: Callable[[], object] | None = None
    ) -> torch.Tensor:
        """The tower behind its input: device tensors only, so that a graph can hold it."""
        x_UY: torch.Tensor = self.patch_embed(patches_UF, rows.adapter_U)
        for block in self.blocks:
            if between_layers is not None:
                between_layers()
            x_UY = self.run_block(block, x_UY, rows)
        out: torch.Tensor = self.norm(x_UY)
        return out

    def _rows(self, images: ImageBatch) -> PackedRows:
        vision, device = self.vision, images.patches_U.device
        cos_UR, sin_UR = rotary_tables(
            images.grids_I2, vision.rope_theta, vision.hidden_size // vision.num_attention_heads
        )
        counts_I = images.cu_seqlens_I1.diff()
        return PackedRows(
            cos_UR=cos_UR.to(device),
            sin_UR=sin_UR.to(device),
            cu_seqlens_I1=images.cu_seqlens_I1,
            offsets=offsets(images.grids_I2),
            adapter_U=images.adapter_I.repeat_interleave(counts_I, output_size=len(images.patches_U)),
        )
