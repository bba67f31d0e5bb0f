"""Section 9 of the specification once more, in plain numpy and float64: the tower, the aligner and the block of rows.

Written from the text alone, loop by loop, sharing nothing with the package: an error would have to be made twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

Array = NDArray[np.float64]
_erf = np.vectorize(math.erf, otypes=[np.float64])


def rms_norm(x: Array, weight: NDArray[Any], eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def turn(vectors: Array, grid: tuple[int, int], theta: float) -> Array:
    """The 2-D rotary embedding of one head, [n, dim]; patch u stands at row u // columns, column u % columns."""
    half = vectors.shape[1] // 2
    quarter = half // 2
    u = np.arange(len(vectors))
    out = np.empty_like(vectors)
    for d in range(half):
        position = u // grid[1] if d < quarter else u % grid[1]
        frequency = np.float32(theta ** (-2 * (d % quarter) / half))
        angle = (position.astype(np.float32) * frequency).astype(np.float64)
        a, b = vectors[:, d], vectors[:, d + half]
        out[:, d] = a * np.cos(angle) - b * np.sin(angle)
        out[:, d + half] = b * np.cos(angle) + a * np.sin(angle)
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
        logits = turn(q, grid, theta) @ turn(k, grid, theta).T * dim**-0.5
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


# Sections 9.1, 9.2 and 9.5 with the numbers of the release: patches of 14, cells of 3 x 3, 381 tokens, 384² pixels.


def block_tokens(wp: int, hp: int) -> int:
    nh, nw = math.ceil(hp / 14 / 3), math.ceil(wp / 14 / 3)
    rows = nh if nh % 2 == 0 else nh + 1
    body = rows * (nw + 1)
    if (body // 2) % 2 == 1:
        body += 2
    return body + 2


def planned_size(w0: int, h0: int) -> tuple[int, int]:
    """Pixels (width, height) a picture is resized to."""
    w, h = w0, h0
    if w > 8 * h:
        w = 8 * h
    if w * h < 147456:
        rho = math.sqrt(147456 / (w * h))
        w, h = int(w * rho), int(h * rho)
    wp, hp = math.ceil(w / 14) * 14, math.ceil(h / 14) * 14
    budget = 381
    while block_tokens(wp, hp) > 381:
        q = h / w
        columns = math.sqrt((budget - 2) / q + 0.25) - 0.5
        rows = columns * q
        if columns < 1:
            wp, hp = 42, (budget - 2) // 2 // 2 * 2 * 42
        elif rows < 2:
            wp, hp = ((budget - 2) // 2 - 1) * 42, 84
        else:
            beta = min(math.floor(columns) * 42 / w, math.floor(rows) // 2 * 2 * 42 / h)
            wp, hp = math.floor(w * beta / 14) * 14, math.floor(h * beta / 14) * 14
        budget -= 1
    return wp, hp


def normalised_patches(picture: Image.Image) -> tuple[Array, tuple[int, int]]:
    """Patches [n, 3, 14, 14] as the reference's bf16 values, and the grid (rows, columns)."""
    rgb = picture.convert("RGB")
    size = planned_size(*rgb.size)
    resized = rgb.resize(size) if rgb.width >= 8 * rgb.height else ImageOps.pad(rgb, size, color=(127, 127, 127))
    value = (np.asarray(resized).astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    ny, nx = size[1] // 14, size[0] // 14
    patches = np.zeros((ny * nx, 3, 14, 14))
    for n in range(ny * nx):
        top, left = n // nx * 14, n % nx * 14
        patches[n] = value[top : top + 14, left : left + 14].transpose(2, 0, 1)
    return to_bfloat16(patches), (ny, nx)


def to_bfloat16(values: Array) -> Array:
    """The nearest bf16 values, ties to even: 8 significant bits."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 256) / 256, exponent)


def block(nh: int, nw: int, start: int) -> tuple[list[str], list[int]]:
    """Roles of a block at prompt position `start`, and the aligner row of each of its IMAGE slots."""
    roles = ["pad"] * (3 - start % 4) + ["start"]
    order = []
    body = []
    for pair in range(0, nh, 2):
        for column in range(nw + 1):
            for row in (pair, pair + 1):
                if row >= nh:
                    body.append("pad")
                elif column == nw:
                    body.append("newline")
                else:
                    body.append("image")
                    order.append(row * nw + column)
    if (len(body) // 2) % 2 == 1:
        body += ["pad", "pad"]
    return roles + body + ["end"], order
