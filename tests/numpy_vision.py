"""Section 9 of the specification once more, in plain numpy and float64: the tower, the aligner and the block of rows.

Written from the text alone, loop by loop, sharing nothing with the package: an error would have to be made twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_erf = np.vectorize(math.erf, otypes=[np.float64])


def rms_norm(x: Array, weight: NDArray[Any], eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def turn(vector: Array, row: int, column: int, theta: float) -> Array:
    """The 2-D rotary embedding of one head of one patch."""
    half = len(vector) // 2
    quarter = half // 2
    out = vector.copy()
    for d in range(half):
        position = row if d < quarter else column
        i = d if d < quarter else d - quarter
        angle = float(np.float32(position) * np.float32(theta ** (-2 * i / half)))
        a, b = vector[d], vector[d + half]
        out[d] = a * math.cos(angle) - b * math.sin(angle)
        out[d + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def attention(
    x: Array, weights: Mapping[str, NDArray[Any]], name: str, grid: tuple[int, int], heads: int, theta: float
) -> Array:
    n, width = x.shape
    dim = width // heads
    qkv = x @ weights[f"{name}.wqkv.weight"].T.astype(np.float64) + weights[f"{name}.wqkv.bias"]
    out = np.zeros((n, width))
    for head in range(heads):
        q, k, v = (qkv[:, part * width + head * dim : part * width + (head + 1) * dim] for part in range(3))
        q = np.stack([turn(q[u], u // grid[1], u % grid[1], theta) for u in range(n)])
        k = np.stack([turn(k[u], u // grid[1], u % grid[1], theta) for u in range(n)])
        logits = q @ k.T * dim**-0.5
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        out[:, head * dim : (head + 1) * dim] = p / p.sum(axis=1, keepdims=True) @ v
    return out @ weights[f"{name}.wo.weight"].T.astype(np.float64) + weights[f"{name}.wo.bias"]


def mlp(x: Array, weights: Mapping[str, NDArray[Any]], name: str) -> Array:
    both = x @ weights[f"{name}.w1.weight"].T.astype(np.float64)
    inner = both.shape[1] // 2
    gate, up = both[:, :inner], both[:, inner:]
    return (gate / (1 + np.exp(-gate)) * up) @ weights[f"{name}.w2.weight"].T.astype(np.float64)


def tower(
    patches: NDArray[Any],
    grid: tuple[int, int],
    weights: Mapping[str, NDArray[Any]],
    *,
    layers: int,
    heads: int,
    theta: float,
    eps: float,
) -> Array:
    """Rows [n, width] of one picture; `patches` normalised [n, 3, p, p]."""
    flat = patches.reshape(len(patches), -1).astype(np.float64)
    x = flat @ weights["vision.patch_embed.proj.weight"].T.astype(np.float64) + weights["vision.patch_embed.proj.bias"]
    for j in range(layers):
        name = f"vision.blocks.{j}"
        x = x + attention(
            rms_norm(x, weights[f"{name}.norm1.weight"], eps), weights, f"{name}.attn", grid, heads, theta
        )
        x = x + mlp(rms_norm(x, weights[f"{name}.norm2.weight"], eps), weights, f"{name}.mlp")
    return rms_norm(x, weights["vision.norm.weight"], eps)


def aligner(rows: Array, grid: tuple[int, int], weights: Mapping[str, NDArray[Any]], *, ratio: int) -> Array:
    """Rows [cells, hidden] of one picture, reading order."""
    ny, nx = grid
    width = rows.shape[1]
    cells_y, cells_x = math.ceil(ny / ratio), math.ceil(nx / ratio)
    image = np.zeros((width, cells_y * ratio, cells_x * ratio))
    for y in range(ny):
        for x in range(nx):
            image[:, y, x] = rows[y * nx + x]
    features = np.zeros((cells_y * cells_x, width * ratio * ratio))
    for cell in range(cells_y * cells_x):
        top, left = cell // cells_x * ratio, cell % cells_x * ratio
        for c in range(width):
            for ky in range(ratio):
                for kx in range(ratio):
                    features[cell, c * ratio * ratio + ky * ratio + kx] = image[c, top + ky, left + kx]
    hidden = features @ weights["aligner.w1.weight"].T.astype(np.float64) + weights["aligner.w1.bias"]
    hidden = hidden * 0.5 * (1 + _erf(hidden / math.sqrt(2)))
    return hidden @ weights["aligner.w2.weight"].T.astype(np.float64) + weights["aligner.w2.bias"]
