"""The image tower of the released size on a GPU: packing, graphs, memory, and how far from the compute bound.

Weights and patches are random. "plain" is the tower written the straightforward way (bf16 matrix products, norms and
rotary embedding composed of torch operations in fp32, torch's fused attention), one image a call; "eager" is ours
without graphs, "graphs" ours as it runs by default. A call starts with patches on the GPU and ends with image rows
there; the time is that between two events on the GPU, host work in between included.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch.nn import functional

from spyglass.batch.images import Grid, num_cells, offsets, pack_images
from spyglass.batch.types import ImageBatch
from spyglass.bench.machine import RESULTS, describe_machine, positive, save_numbers
from spyglass.config.model import VisionConfig
from spyglass.config.presets import config_of, released_vision
from spyglass.families import FAMILIES
from spyglass.layers.build import BuildContext, weight_slots
from spyglass.layers.linear import Linear
from spyglass.ops.table import bind_ops
from spyglass.params.table import tower_params
from spyglass.prompt import plan_image
from spyglass.quant.formats import BF16
from spyglass.quant.packed import Packed
from spyglass.vision.aligner import Aligner, unfold_cells
from spyglass.vision.graphs import VisionGraphs, why_not
from spyglass.vision.tower import VisionBlock, VisionTower, rotary_tables

Work = Callable[[ImageBatch], torch.Tensor]
TOWERS = {  # and the text model's width
    family.short_name: (released_vision(family), config_of(family.presets[-1]).text.hidden_size)
    for family in FAMILIES.values()
}
SINGLE: Grid = (28, 28)
SIZES = ((640, 480), (1280, 720), (512, 512), (1920, 1080), (768, 1024), (400, 300), (224, 224), (1000, 250))
LARGEST: dict[str, tuple[Grid, ...]] = {"paired": ((24, 138),), "reading": ((60, 150), (3, 3063))}  # by layout
PACKING_GOAL, GRAPH_GOAL = 1.5, 3.0
EARLIER_EAGER_MS = 9.4  # eager torch, one image of 784 patches, on an H200


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Median milliseconds of one piece of work by way of doing it, and what came out.

    `difference`: largest difference of the other ways' image rows from eager, packed; `largest_value` for scale.
    """

    family: str
    what: str
    patches: int
    milliseconds: dict[str, float]
    difference: dict[str, float]
    largest_value: float
    bound_ms: float
    peak_bytes: int = 0


class Measured:
    """Tower and aligner of a configuration, filled with random weights."""

    def __init__(self, vision: VisionConfig, hidden: int, device: str, dtype: str = "bfloat16") -> None:
        self.vision, self.device = vision, torch.device(device)
        self.dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
        build = BuildContext(
            ops=bind_ops(self.device.type, dtype),
            device=self.device,
            dtype=self.dtype,
            params=tower_params(vision, hidden),
        )
        self.tower, self.aligner = VisionTower(vision, build), Aligner(vision, build)
        self.generator = torch.Generator(self.device).manual_seed(0)
        for slot in [*weight_slots(self.tower), *weight_slots(self.aligner)]:
            values = torch.randn(slot.shape, generator=self.generator, device=self.device)
            values = 1 + 0.1 * values if "norm" in slot.name else values * slot.shape[-1] ** -0.5
            slot.put(Packed(BF16, values.to(torch.bfloat16), None, slot.shape))
        self.graphs = VisionGraphs(self.tower, self.aligner, build) if why_not(build) is None else None

    def images(self, grids: Sequence[Grid]) -> ImageBatch:
        """Random pixels on the device."""
        side = self.vision.patch_size
        pixels = [
            torch.randint(
                0, 256, (h * w, 3, side, side), dtype=torch.uint8, device=self.device, generator=self.generator
            )
            for h, w in grids
        ]
        return pack_images(pixels, grids, self.vision, device=self.device)

    def split(self, images: ImageBatch) -> list[ImageBatch]:
        """One batch per image."""
        parts = images.patches_U.split([h * w for h, w in images.grids_I2])
        return [
            pack_images([part], [grid], self.vision, device=self.device)
            for part, grid in zip(parts, images.grids_I2, strict=True)
        ]

    def eager(self, images: ImageBatch) -> torch.Tensor:
        out: torch.Tensor = self.aligner(self.tower(images), images.grids_I2, images.adapter_I)
        return out

    def graphed(self, images: ImageBatch) -> torch.Tensor:
        assert self.graphs is not None
        return self.graphs(images)

    def one_by_one(self, work: Work) -> Work:
        """The same as a call per image; cutting the batch is not timed."""
        cut: dict[int, list[ImageBatch]] = {}

        def run(images: ImageBatch) -> torch.Tensor:
            if id(images) not in cut:
                cut[id(images)] = self.split(images)
            return torch.cat([work(one) for one in cut[id(images)]])

        return run

    def plain(self, images: ImageBatch) -> torch.Tensor:
        """One image, the straightforward way."""
        (grid,), vision = images.grids_I2, self.vision
        head_dim = vision.hidden_size // vision.num_attention_heads
        cos, sin = (table.to(self.device)[:, None] for table in rotary_tables([grid], vision.rope_theta, head_dim))
        x = _linear(self.tower.patch_embed, self.tower.patch_values(images.patches_U))
        for block in self.tower.blocks:
            assert isinstance(block, VisionBlock)
            qkv = _linear(block.attn.wqkv, self._norm(x, block.norm1.weight_D)).unflatten(-1, (3, -1, head_dim))
            q, k = (_turned(qkv[:, i], cos, sin).transpose(0, 1)[None] for i in (0, 1))
            mixed = functional.scaled_dot_product_attention(q, k, qkv[:, 2].transpose(0, 1)[None])
            x = x + _linear(block.attn.wo, mixed[0].transpose(0, 1).flatten(1))
            gate, up = _linear(block.mlp.w1, self._norm(x, block.norm2.weight_D)).chunk(2, dim=-1)
            x = x + _linear(block.mlp.w2, functional.silu(gate) * up)
        cells = unfold_cells(self._norm(x, self.tower.norm.weight_D), [grid], vision.downsample_ratio)
        return _linear(self.aligner.w2, functional.gelu(_linear(self.aligner.w1, cells)))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        assert weight is not None
        wide = x.float()
        return (weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.vision.norm_eps))).to(x.dtype)


def _linear(module: Linear, x: torch.Tensor) -> torch.Tensor:
    assert module.weight is not None
    bias = None if module.bias_O is None else module.bias_O.to(x.dtype)
    return functional.linear(x, module.weight.data.to(x.dtype), bias)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def tower_flops(vision: VisionConfig, hidden: int, grids: Sequence[Grid]) -> float:
    """Floating-point operations of tower and aligner: 2 per multiply-add of all matrix products and of attention."""
    width, layers = vision.hidden_size, vision.num_hidden_layers
    block = 4 * width**2 + 3 * width * vision.intermediate_size
    cells = sum(num_cells(grid, vision.downsample_ratio) for grid in grids)
    attention = sum(4 * layers * (h * w) ** 2 * width for h, w in grids)
    linear = 2 * offsets(grids)[-1] * (3 * vision.patch_size**2 * width + layers * block)
    return float(linear + attention + 2 * cells * hidden * (width * vision.downsample_ratio**2 + hidden))


def milliseconds(calls: Sequence[Callable[[], object]], device: torch.device, runs: int) -> float:
    """Median over `runs` calls that take turns, after a warm-up of each."""
    for call in calls:
        call()
    times = []
    for _, call in zip(range(runs), cycle(calls), strict=False):
        if device.type == "cuda":
            torch.cuda.synchronize()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last))
        else:
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def matmul_tflops(device: torch.device, size: int = 8192, runs: int = 10) -> float:
    """bf16 matrix product of random numbers, TFLOP/s: what this machine's bound is taken from."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / milliseconds([lambda: a @ b], device, runs) / 1e9


def measure(measured: Measured, what: str, family: str, grids: Sequence[Grid], rate: float, runs: int) -> Row:
    """One row: every way of encoding the images, compared with eager first."""
    inputs = [measured.images(grids) for _ in range(4 if len(grids) == 1 or offsets(grids)[-1] < 20_000 else 1)]
    ways: dict[str, Work] = {"plain": measured.one_by_one(measured.plain), "eager": measured.eager}
    if len(grids) > 1:
        ways["eager, one by one"] = measured.one_by_one(measured.eager)
    if measured.graphs is not None:
        ways["graphs"] = measured.graphed
        if len(grids) > 1:
            ways["graphs, one by one"] = measured.one_by_one(measured.graphed)
    expected = measured.eager(inputs[0]).float()
    flops = tower_flops(measured.vision, measured.aligner.w1.out_features, grids)
    return Row(
        family=family,
        what=what,
        patches=offsets(grids)[-1],
        milliseconds={
            name: milliseconds([partial(work, images) for images in inputs], measured.device, runs)
            for name, work in ways.items()
        },
        difference={name: float((work(inputs[0]).float() - expected).abs().max()) for name, work in ways.items()},
        largest_value=float(expected.abs().max()),
        bound_ms=flops / rate / 1e9,
        peak_bytes=_peak(measured, inputs[0]),
    )


def _peak(measured: Measured, images: ImageBatch) -> int:
    """Memory of a call beyond weights and input."""
    if measured.device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    measured.eager(images)
    return torch.cuda.max_memory_allocated() - before


def _prepared(measured: Measured) -> str:
    """Capture every graph; how long that takes and how much memory it holds."""
    if measured.graphs is None:
        return "no graphs"
    measured.eager(measured.images([SINGLE]))  # compiles what is compiled once
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, started = torch.cuda.memory_reserved(), time.perf_counter()
    measured.graphs.prepare()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved() - before
    return f"{len(measured.graphs.ladder)} graphs captured in {seconds:.1f} s, holding {held / 1e6:.0f} MB"


def jobs(family: str) -> list[tuple[str, list[Grid]]]:
    """What is measured: one image, eight mixed ones, the largest and eight of it."""
    vision, _ = TOWERS[family]
    mixed = [plan_image(*size, vision).vit_grid for size in SIZES]
    work: list[tuple[str, list[Grid]]] = [("one image", [SINGLE]), ("8 mixed", mixed)]
    for grid in LARGEST[vision.layout]:
        work += [(f"largest {grid[0]}x{grid[1]}", [grid]), (f"8 of {grid[0]}x{grid[1]}", [grid] * 8)]
    return work


def run(argv: Sequence[str]) -> int:
    """Print the table, and save the numbers if asked."""
    parser = argparse.ArgumentParser(prog="spyglass bench vision", description=__doc__)
    parser.add_argument(
        "--runs", type=positive, default=20, help="timed calls of each way, the median counts (default 20)"
    )
    parser.add_argument("--family", choices=TOWERS, action="append", help="whose tower (default: all)")
    parser.add_argument("--save", metavar="FILE", nargs="?", const="", help=f"write JSON (default below {RESULTS})")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("this benchmark measures a CUDA device, and torch sees none")
        return 1
    machine = describe_machine() | {"gpu": torch.cuda.get_device_name()}
    with torch.inference_mode():
        rate = matmul_tflops(torch.device("cuda"))
        rows, captures = [], []
        for family in args.family or TOWERS:
            measured = Measured(*TOWERS[family], "cuda")
            captures.append(f"{family}: {_prepared(measured)}")
            for what, grids in jobs(family):
                rows.append(measure(measured, what, family, grids, rate, args.runs if len(grids) == 1 else 8))
    print("\n".join([as_text(machine, rate, rows), *captures]))
    if args.save is not None:
        numbers = {"tflops": rate, "captures": captures, "results": [asdict(row) for row in rows]}
        save_numbers("vision", machine, numbers, Path(args.save) if args.save else None)
    return 0


def as_text(machine: dict[str, str], rate: float, rows: Sequence[Row]) -> str:
    """The table for people, and whether the two goals are met."""
    lines = [
        ", ".join(f"{name} {value}" for name, value in machine.items()),
        f"milliseconds, medians; bound = operations at {rate:.0f} TFLOP/s, the measured bf16 matrix product",
    ]
    for row in rows:
        best = min(ms for name, ms in row.milliseconds.items() if name in ("eager", "graphs"))
        lines += [
            f"{row.family} {row.what}, {row.patches} patches: bound {row.bound_ms:.2f}, "
            f"{row.bound_ms / best:.0%} of it reached, peak {row.peak_bytes / 1e6:.0f} MB beyond weights and input",
            *(
                f"  {name:20}{ms:9.3f}   differs from eager by {row.difference[name]:.3g} of {row.largest_value:.3g}"
                for name, ms in row.milliseconds.items()
            ),
            *_goals(row),
        ]
    return "\n".join(lines)


def _goals(row: Row) -> list[str]:
    ms = row.milliseconds
    if row.what == "one image" and "graphs" in ms:
        return [
            f"  graphs {ms['plain'] / ms['graphs']:.2f}x faster than plain torch (goal {GRAPH_GOAL}x; "
            f"{EARLIER_EAGER_MS} ms were measured for it before), {ms['eager'] / ms['graphs']:.2f}x than ours eager"
        ]
    if "eager, one by one" in ms:
        best = min(ms[name] for name in ("eager", "graphs") if name in ms)
        goal = f" (goal {PACKING_GOAL}x)" if row.what == "8 mixed" else ""
        return [
            f"  packed {ms['eager, one by one'] / best:.2f}x faster than a call per image{goal}, "
            f"{ms['plain'] / best:.2f}x than plain torch an image at a time"
        ]
    return []
