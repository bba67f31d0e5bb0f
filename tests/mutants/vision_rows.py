"""Faults in packing, tower, aligner and the tower's attention."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PACKING = "spyglass/batch/images.py"
PIXELS = "spyglass/vision/pixels.py"
TOWER = "spyglass/vision/tower.py"
ALIGNER = "spyglass/vision/aligner.py"
ATTENTION = "spyglass/ops/vit_attention/reference.py"
VARLEN = "spyglass/ops/vit_attention/varlen.py"
ROPE = "spyglass/ops/rope_half/reference.py"
SILU = "spyglass/ops/silu_mul/reference.py"
GRAPHS = "spyglass/vision/graphs.py"
TESTS = "tests/unit/vision"
PACK_TESTS = "tests/unit/batch"
OP_TESTS = "tests/ops/test_vit_attention.py"
ROPE_TESTS = "tests/ops/test_rope_half.py"
GRAPH_TESTS = "tests/unit/vision/test_graphs.py"

VISION_ROWS: list[Mutant] = [
    Mutant(PIXELS, "- 0.5) / 0.5).to(torch.bfloat16).float()", "- 0.5) / 0.5)", TESTS, "pixels not rounded to bf16"),
    Mutant(PIXELS, "pixel / 255 - 0.5", "pixel / 256 - 0.5", TESTS, "pixels divided by 256"),
    Mutant(PACKING, "-(-grid[0] // ratio)", "(grid[0] // ratio)", PACK_TESTS, "the last row of cells forgotten"),
    Mutant(PACKING, "-(-grid[1] // ratio)", "(grid[1] // ratio)", PACK_TESTS, "the last column of cells forgotten"),
    Mutant(PACKING, "if len(pixels) != rows * columns:", "if len(pixels) < rows * columns:", PACK_TESTS,
           "extra patches pass"),
    Mutant(PACKING, "if positions != num_cells(grid, ratio):", "if False:", PACK_TESTS, "image positions unchecked"),
    Mutant(PACKING, "if len({len(patches), len(vit_grids), len(image_positions)}) > 1:",
           "if len(patches) != len(vit_grids):", PACK_TESTS, "positions not counted"),
    Mutant(PACKING, "if slots is not None and len(slots) != len(patches):", "if False:", PACK_TESTS,
           "slots not counted"),
    Mutant(PACKING, "if rows < 1 or columns < 1:", "if rows < 0 or columns < 0:", PACK_TESTS, "empty grids pass"),
    Mutant(PACKING, "(3, side, side):", "(3, side, side) and False:", PACK_TESTS, "any patch shape passes"),
    Mutant(PACKING, "if not _is_pixels(pixels) and not _is_float(pixels):", "if False:", PACK_TESTS,
           "any patch dtype passes"),
    Mutant(PACKING, "if total > bounds[-1]:", "if False:", PACK_TESTS, "left-over patches pass"),
    Mutant(PACKING, "if stop > total:", "if False:", PACK_TESTS, "patches may run out"),
    Mutant(PACKING, 'requirements=["C", "W"]', 'requirements=["C"]', f"{PACK_TESTS} -W error",
           "read-only arrays shared"),
    Mutant(PACKING, "if p.dtype == torch.uint8 else", "if False else", PACK_TESTS,
           "pixels beside floats not normalised"),
    Mutant(TOWER, "np.repeat(np.arange(height), width)", "np.tile(np.arange(height), width)", TESTS,
           "rows run fastest"),
    Mutant(TOWER, "torch.cat([cos_PR[row_U], cos_PR[column_U]], dim=1)",
           "torch.cat([cos_PR[column_U], cos_PR[row_U]], dim=1)", TESTS, "row and column swapped in the cosine"),
    Mutant(TOWER, "torch.cat([sin_PR[row_U], sin_PR[column_U]], dim=1)",
           "torch.cat([sin_PR[column_U], sin_PR[row_U]], dim=1)", TESTS, "row and column swapped in the sine"),
    Mutant(TOWER, "rope_frequencies(theta, head_dim // 2, None)", "rope_frequencies(10000.0, head_dim // 2, None)",
           TESTS,
           "a fixed rope base"),
    Mutant(ROPE, "a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos - a * sin", ROPE_TESTS,
           "turned backwards"),
    Mutant(ROPE, "a, b = x_UHD.float().chunk(2, dim=-1)", "a, b = x_UHD.chunk(2, dim=-1)\n    cos_UR, sin_UR = "
           "cos_UR.to(a.dtype), sin_UR.to(a.dtype)", ROPE_TESTS, "rotary products in bf16"),
    Mutant(TOWER, "q_UHD, k_UHD = turned.chunk(2, dim=1)", "q_UHD, k_UHD = qkv[:, 0], turned.chunk(2, dim=1)[1]", TESTS,
           "q not turned"),
    Mutant(TOWER, "q_UHD, k_UHD = turned.chunk(2, dim=1)", "q_UHD, k_UHD = turned.chunk(2, dim=1)[0], qkv[:, 1]", TESTS,
           "k not turned"),
    Mutant(TOWER, "q_UHD, k_UHD, qkv[:, 2]", "k_UHD, q_UHD, qkv[:, 2]", TESTS, "q and k swapped"),
    Mutant(TOWER, "float(q_UHD.shape[-1]) ** -0.5", "0.125", TESTS, "a fixed scale"),
    Mutant(TOWER, "unflatten(-1, (3, self.heads, -1))", "unflatten(-1, (self.heads, 3, -1)).transpose(1, 2)", TESTS,
           "q, k and v interleaved by head"),
    Mutant(SILU, "gate, up = x_UF", "up, gate = x_UF", TESTS, "gate and up swapped"),
    Mutant(SILU, "torch.nn.functional.silu(gate) * up",
           "(torch.nn.functional.silu(gate.float()) * up.float()).to(up.dtype)", TESTS, "silu not rounded"),
    Mutant(TOWER, "x_UY = x_UY + self.attn(", "x_UY = self.attn(", TESTS, "no residual around attention"),
    Mutant(TOWER, "= x_UY + self.mlp(", "= self.mlp(", TESTS, "no residual around the MLP"),
    Mutant(TOWER, "self.mlp(self.norm2(x_UY)", "self.mlp(self.norm1(x_UY)", TESTS, "the wrong norm before the MLP"),
    Mutant(TOWER, 'RMSNorm("vision.norm", width, vision.norm_eps, build)',
           'RMSNorm("vision.norm", width, 1e-20, build)',
           TESTS, "another eps in the last norm"),
    Mutant(TOWER, 'RMSNorm(f"{name}.norm1", vision.hidden_size, vision.norm_eps, build)',
           'RMSNorm(f"{name}.norm1", vision.hidden_size, 1e-20, build)', TESTS, "another eps before attention"),
    Mutant(TOWER, "out: torch.Tensor = self.norm(x_UY)", "out: torch.Tensor = x_UY", TESTS, "no last norm"),
    Mutant(TOWER, "offsets=rows.offsets", "offsets=(0, rows.offsets[-1])", TESTS, "pictures see one another"),
    Mutant(TOWER, "images.slot_I.repeat_interleave(counts_I,", "images.slot_I.repeat_interleave(counts_I.flip(0),",
           TESTS,
           "adapters on the wrong pictures"),
    Mutant(ALIGNER, "transpose(1, 2).flatten(1)", "flatten(1)", TESTS, "features in cell order, not channel-major"),
    Mutant(ALIGNER, 'approximate="none"', 'approximate="tanh"', TESTS, "tanh GELU"),
    Mutant(ALIGNER, "first + y * width + x", "first + x * height + y", TESTS, "the grid read by columns"),
    Mutant(ALIGNER, "(y < height) & (x < width)", "(y < height) & (x < width + 1)", TESTS,
           "the next row in the padding"),
    Mutant(ALIGNER, "rows_UY.new_zeros(1,", "rows_UY.new_ones(1,", TESTS, "padding of ones"),
    Mutant(ALIGNER, "self.w1(cells_ID, slot)", "self.w1(cells_ID)", TESTS, "no adapter on the aligner"),
    Mutant(ATTENTION, "scale=scale)", "scale=None)", OP_TESTS, "the scale ignored"),
    Mutant(ATTENTION, "for start, stop in pairwise(offsets):", "for start, stop in [(0, offsets[-1])]:", OP_TESTS,
           "one picture of all"),
    Mutant(VARLEN, "shape[-1] % 8 or", "shape[-1] % 2 or", OP_TESTS, "heads that flash cannot hold"),
    Mutant(VARLEN, '("bfloat16", "float16")', '("bfloat16", "float16", "float32")', OP_TESTS, "float32 in flash"),
    Mutant(GRAPHS, "patches <= budget.patches and", "True and", GRAPH_TESTS, "more patches than rows"),
    Mutant(GRAPHS, "cells <= budget.cells and", "True and", GRAPH_TESTS, "more cells than rows"),
    Mutant(GRAPHS, "len(grids) <= budget.pictures:", "True:", GRAPH_TESTS, "more pictures than borders"),
    Mutant(GRAPHS, "cu_seqlens[len(borders) :] = borders[-1]", "cu_seqlens[len(borders) :] = 0", GRAPH_TESTS,
           "absent pictures begin at 0"),
    Mutant(GRAPHS, "index[cells.size :] = -1", "index[cells.size :] = 0", GRAPH_TESTS, "absent cells read a picture"),
    Mutant(GRAPHS, "index_select(0, row_U), self._cos_PR.index_select(0, column_U)",
           "index_select(0, column_U), self._cos_PR.index_select(0, row_U)", GRAPH_TESTS, "row and column swapped"),
    Mutant(GRAPHS, "if torch.is_grad_enabled():", "if False:", GRAPH_TESTS, "graphs where gradients are wanted"),
    Mutant(GRAPHS, "if leaf.adapter is not None or", "if", GRAPH_TESTS, "graphs without the adapter"),
    Mutant(GRAPHS, "now is not then for", "False for", GRAPH_TESTS, "replaced weights not noticed"),
]  # fmt: skip
