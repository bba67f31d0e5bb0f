"""The image path against the straightforward pipeline: PIL, float32, bf16, permute.

Decoding and the resize itself are the same in both, as only Pillow's resize gives the reference's pixels; they are
timed on their own. "rest" is everything else. Ours hands over uint8 patches, which are normalised by a 256-entry
table where they are used; "rest + table" does that on the processor too, so that both pipelines end with the same
bf16 bits, which is checked.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from spyglass.bench.machine import describe_machine, positive
from spyglass.config import VisionConfig
from spyglass.config.fields import number
from spyglass.config.presets import released_vision
from spyglass.families import FAMILIES
from spyglass.prompt import (
    ImagePlan,
    contained_size,
    cut,
    normalise,
    open_image,
    patchify,
    plan_image,
    prompt_digest,
    to_rgb,
)
from spyglass.prompt.image import PAD_COLOUR, centre

_SIZES = {"720p": (1280, 720), "1080p": (1920, 1080), "12 MP": (4000, 3000)}
_FAMILIES = {family.short_name: released_vision(family) for family in FAMILIES.values()}
_THREADS = (1, 2)
_GOAL = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTimes:
    """Medians of one image size and family: milliseconds per stage, images a second and thread by thread count."""

    image: str
    family: str
    patches: int
    decode_ms: float
    resize_ms: float
    plain_rest_ms: float
    our_rest_ms: float
    our_rest_and_table_ms: float
    digest_ms: float
    plain_per_second: dict[int, float]
    our_per_second: dict[int, float]

    @property
    def share(self) -> float:
        """Our rest as a share of the straightforward pipeline's."""
        return self.our_rest_ms / self.plain_rest_ms

    @property
    def share_with_table(self) -> float:
        """The same with normalising on the processor."""
        return self.our_rest_and_table_ms / self.plain_rest_ms


def run(argv: Sequence[str]) -> int:
    """Print the table (or JSON)."""
    parser = argparse.ArgumentParser(prog="spyglass bench image", description=__doc__)
    parser.add_argument("--runs", type=positive, default=15, help="runs of each stage, the median counts (default 15)")
    parser.add_argument("--seconds", type=number, default=1.5, help="per throughput measurement (default 1.5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = [
        measure(name, size, family, args.runs, args.seconds) for name, size in _SIZES.items() for family in _FAMILIES
    ]
    machine = describe_machine()
    if args.json:
        rows = [asdict(row) | {"share": row.share, "share_with_table": row.share_with_table} for row in results]
        print(json.dumps({"machine": machine, "goal": _GOAL, "results": rows}, indent=2))
    else:
        print(_as_text(machine, results))
    return 0


def photograph(size: tuple[int, int]) -> bytes:
    """A JPEG with the detail of a photograph: soft shapes, edges and sensor noise, the same on every machine."""
    generator = np.random.default_rng(7)
    soft = Image.fromarray(generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
        size, Image.Resampling.BICUBIC
    )
    grain = generator.integers(-12, 13, (size[1], size[0], 1), dtype=np.int16)
    edges = (np.indices((size[1], size[0])).sum(0) // 97 % 2 * 24 - 12)[..., None]
    pixels = np.clip(np.asarray(soft, np.int16) + grain + edges, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def measure(name: str, size: tuple[int, int], family: str, runs: int, seconds: float) -> ImageTimes:
    """All stages of one size and family, taking turns; stops if the two pipelines differ in a single bit."""
    vision, data = _FAMILIES[family], photograph(size)
    image = Image.open(io.BytesIO(data))
    image.load()
    plan = plan_image(*size, vision)
    small = image.resize(_inner(image, plan), Image.Resampling.BICUBIC)
    pixels = ours_after(small, plan)
    assert torch.equal(plain_after(small, plan).view(torch.uint16), torch.from_numpy(normalise(pixels)))
    assert np.array_equal(patchify(data, plan), pixels)

    def our_rest() -> NDArray[np.uint8]:
        to_rgb(image)
        return ours_after(small, plan_image(*size, vision))

    stages: dict[str, Callable[[], object]] = {
        "decode": lambda: Image.open(io.BytesIO(data)).load(),
        "resize": lambda: image.resize(small.size, Image.Resampling.BICUBIC),
        "plain": lambda: (image.convert("RGB"), plain_after(small, plan)),
        "ours": our_rest,
        "ours and table": lambda: normalise(our_rest()),
        "digest": lambda: prompt_digest(pixels, plan),
    }
    medians = _medians(stages, runs)
    plain = {threads: _per_second(lambda: _plain(data, vision), threads, seconds) for threads in _THREADS}
    ours = {threads: _per_second(lambda: _ours(data, vision), threads, seconds) for threads in _THREADS}
    return ImageTimes(
        image=name,
        family=family,
        patches=len(pixels),
        decode_ms=medians["decode"],
        resize_ms=medians["resize"],
        plain_rest_ms=medians["plain"],
        our_rest_ms=medians["ours"],
        our_rest_and_table_ms=medians["ours and table"],
        digest_ms=medians["digest"],
        plain_per_second=plain,
        our_per_second=ours,
    )


def plain_after(resized: Image.Image, plan: ImagePlan) -> torch.Tensor:
    """The straightforward pipeline behind the resize: pad, float32, normalise, bf16, permute; bf16 [N, 3, p, p]."""
    if resized.size != plan.resized:
        canvas = Image.new("RGB", plan.resized, PAD_COLOUR)
        left, top = (round((outer - inner) * 0.5) for outer, inner in zip(plan.resized, resized.size, strict=True))
        canvas.paste(resized, (left, top))
        resized = canvas
    value = np.asarray(resized).astype(np.float32) / 255
    value = (value - 0.5) / 0.5
    (rows, columns), patch = plan.vit_grid, plan.patch_size
    grid = torch.from_numpy(value).to(torch.bfloat16).reshape(rows, patch, columns, patch, 3)
    return grid.permute(0, 2, 4, 1, 3).reshape(rows * columns, 3, patch, patch).contiguous()


def ours_after(resized: Image.Image, plan: ImagePlan) -> NDArray[np.uint8]:
    """Our path behind the resize; uint8 [N, 3, p, p]."""
    return cut(centre(resized, plan.resized), plan)


def _inner(image: Image.Image, plan: ImagePlan) -> tuple[int, int]:
    return plan.resized if plan.stretch else contained_size(image.size, plan.resized)


def _plain(data: bytes, vision: VisionConfig) -> torch.Tensor:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    plan = plan_image(*image.size, vision)
    return plain_after(image.resize(_inner(image, plan), Image.Resampling.BICUBIC), plan)


def _ours(data: bytes, vision: VisionConfig) -> NDArray[np.uint8]:
    image = open_image(data)
    return patchify(image, plan_image(*image.size, vision))


def _medians(stages: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Milliseconds of each stage; stages take turns, so that a change of the machine's mood meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(runs):
        for name, stage in stages.items():
            started = time.perf_counter()
            stage()
            times[name].append((time.perf_counter() - started) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def _per_second(work: Callable[[], object], threads: int, seconds: float) -> float:
    """Images per second and thread while `threads` threads work side by side."""

    def loop() -> int:
        done = 0
        while time.perf_counter() < stop:
            work()
            done += 1
        return done

    work()
    started = time.perf_counter()
    stop = started + seconds
    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(lambda _: loop(), range(threads)))
    return done / (time.perf_counter() - started) / threads


def _as_text(machine: dict[str, str], results: Sequence[ImageTimes]) -> str:
    lines = [
        ", ".join(f"{name} {value}" for name, value in machine.items()),
        f"milliseconds; share = our rest / plain rest, goal {_GOAL:.2f}; images/s per thread, decoding included",
        f"{'image':8}{'model':6}{'patches':>8}{'decode':>8}{'resize':>8}{'plain':>8}{'ours':>7}{'share':>7}"
        f"{'+table':>8}{'share':>7}{'digest':>8}{'plain/s 1,2 threads':>22}{'ours/s 1,2 threads':>21}",
    ]
    for row in results:
        plain, ours = (
            ", ".join(f"{rates[threads]:.1f}" for threads in _THREADS)
            for rates in (row.plain_per_second, row.our_per_second)
        )
        lines.append(
            f"{row.image:8}{row.family:6}{row.patches:8}{row.decode_ms:8.2f}{row.resize_ms:8.2f}"
            f"{row.plain_rest_ms:8.2f}{row.our_rest_ms:7.2f}{row.share:7.2f}{row.our_rest_and_table_ms:8.2f}"
            f"{row.share_with_table:7.2f}{row.digest_ms:8.2f}{plain:>22}{ours:>21}"
        )
    lines.append("bit-equal: yes (every row was compared before it was timed)")
    return "\n".join(lines)
