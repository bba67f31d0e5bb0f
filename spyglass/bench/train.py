"""Fine-tuning at real layer sizes: tokens and images per second, share of the machine's peak, peak memory.

The model of a preset has random packed weights, made on the device; no file is written. Chats are random ids with an
image each, and adapters sit on every group. The bound is what the products of the base weights would take at the speed
of one large bf16 product: forward, forward again (layers are computed twice) and backward to the inputs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from spyglass.bench.machine import RESULTS, describe_machine, positive, save_numbers
from spyglass.bench.op_times import op_times
from spyglass.bench.vision import matmul_tflops, tower_flops
from spyglass.checkpoint.random import preset_tensors, random_tensor
from spyglass.config.model import ModelConfig
from spyglass.config.presets import Preset, preset_config
from spyglass.config.read import parse_model_config
from spyglass.layers.build import BuildContext
from spyglass.lora.new import TRAINED_ADAPTER, new_adapter
from spyglass.model import ModelOptions, VisionLanguageModel
from spyglass.ops.table import bind_ops
from spyglass.params.table import Param
from spyglass.params.targets import GROUPS, UNTRAINABLE
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Patches
from spyglass.quant.codec import encode
from spyglass.quant.packed import Packed
from spyglass.train.log import read_log
from spyglass.train.loop import LoopOptions, MicroLoss, Task, adamw, train
from spyglass.train.loss import step_logits, token_loss
from spyglass.train.packing import PackedStep, Sample, pack
from spyglass.train.recompute import recompute_layers

SIZES: tuple[Preset, ...] = ("tiny", "mini", "flash-4layer")
GRID = (28, 28)  # patches of each image
WARM_UP = 1
_E8M0_ONE = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What was measured; `pack_seconds` is the host's work on the images and tokens of one step."""

    preset: str
    targets: tuple[str, ...]
    rank: int
    trained: int
    tokens: int
    images: int
    learnt: int
    step_seconds: float
    pack_seconds: float
    bound_seconds: float
    weight_bytes: int
    peak_bytes: int
    loss: tuple[float, ...]


def random_model(preset: Preset, device: torch.device) -> VisionLanguageModel:
    """A model of a preset with random packed weights, made where they are used."""
    config = parse_model_config(preset_config(preset, packed=True), f"preset {preset}")
    build = BuildContext(ops=bind_ops(device.type, "bfloat16", "training"), device=device, dtype=torch.bfloat16)
    model = VisionLanguageModel(config, ModelOptions(build=build, numerics="reference"))
    specs, generator = preset_tensors(preset), torch.Generator(device).manual_seed(0)
    for slot in model.slots():
        slot.put(_drawn(slot.name, specs[slot.name], generator, device))
    return model.eval()


def _drawn(name: str, spec: Param, generator: torch.Generator, device: torch.device) -> Packed:
    if spec.kind != "matrix":
        return random_tensor(name, spec, seed=0)
    if spec.format.name == "fp4":
        shape, scale_shape = spec.format.storage_shape(spec.shape), spec.format.scale_shape(spec.shape)
        assert scale_shape is not None
        codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
        size = _E8M0_ONE - round(np.log2(3 * spec.shape[1] ** 0.5))  # codes have a size of about 3
        return Packed(spec.format, codes, torch.full(scale_shape, size, dtype=torch.uint8, device=device), spec.shape)
    values = torch.randn(spec.shape, device=device, generator=generator, dtype=torch.float32)
    return encode(values * (1.0 if name == "embed" else spec.shape[1] ** -0.5), spec.format)


def random_samples(config: ModelConfig, tokens: int, text: int, learnt: int) -> list[Sample]:
    """Chats of one image and `text` tokens, of which the last `learnt` are learnt, up to `tokens` in all."""
    assert config.vision is not None
    source, side, samples = np.random.default_rng(0), config.vision.patch_size, list[Sample]()
    used = 0
    while True:
        pixels = source.integers(0, 256, (GRID[0] * GRID[1], 3, side, side), dtype=np.uint8)
        ids = source.integers(1000, 100_000, text).tolist()
        prompt = prompt_from_parts([ids[:8], Patches(pixels, GRID), ids[8:]], config)
        used += len(prompt)
        if samples and used > tokens:
            return samples
        learn_T = np.zeros(len(prompt), np.bool_)
        learn_T[-learnt:] = True
        samples.append(Sample(prompt=prompt, learn_T=learn_T))


def step_flops(config: ModelConfig, step: PackedStep, specs: dict[str, Param]) -> float:
    """Operations of the base products of one pass: dense matrices, the experts chosen, the head, the tower."""
    text, vision = config.text, config.vision
    assert vision is not None and step.images is not None
    share = text.num_experts_per_tok / text.n_routed_experts
    per_token = 0.0
    for name, spec in specs.items():
        if spec.kind == "matrix" and name.startswith("layers.") and ".engram." not in name:
            size = spec.shape[0] * spec.shape[1]
            per_token += 2 * size * (share if spec.split == "experts" else 1.0)
    head = 2 * text.vocab_size * text.hidden_size * len(step.targets_R)
    tower = tower_flops(vision, text.hidden_size, step.images.grids_I2)
    return per_token * len(step.batch.ids_T) + head + tower


def measure(
    preset: Preset,
    device: torch.device,
    *,
    tokens: int,
    steps: int,
    rank: int,
    rate: float,
    profile: Path | None = None,
) -> Numbers:
    """Train some steps and time all but the first; `rate` TFLOP/s of the large product. See `run` for `profile`."""
    model = random_model(preset, device)
    config = model.config
    on_gpu = device.type == "cuda"
    weights = torch.cuda.memory_allocated(device) if on_gpu else 0
    recompute_layers(model)
    targets = tuple(group for group in GROUPS if group not in UNTRAINABLE)
    adapter = new_adapter(model, targets, rank=rank, alpha=2.0 * rank)
    samples = random_samples(config, tokens, text=192, learnt=64)
    made: list[tuple[float, PackedStep]] = []

    def loss(number: int) -> MicroLoss:
        started = time.perf_counter()
        step = pack(samples, config, device=device, dtype=torch.bfloat16, adapter_id=TRAINED_ADAPTER)
        made[:] = [(time.perf_counter() - started, step)]
        value, count = token_loss(step_logits(model, step), step.targets_R)
        return MicroLoss(loss=value, targets=count, tokens=len(step.batch.ids_T), images=len(samples))

    group = {"params": list(adapter.parameters.values()), "lr": 1e-3, "weight_decay": 0.0}
    task = Task(leaves=adapter.parameters, optimisers=[adamw([group])], loss=loss)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with TemporaryDirectory() as folder:
        options = LoopOptions(steps=WARM_UP + steps, schedule="constant", save_every=1 << 30)
        train(task, options, Path(folder), progress=False)
        rows = read_log(Path(folder))
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    if profile is not None:
        ops = model.options.build.ops
        profile.write_text(op_times(lambda: loss(0).loss.backward(), ops, on_gpu=on_gpu), encoding="utf-8")
    pack_seconds, step = made[0]
    timed = rows[WARM_UP:]
    return Numbers(
        preset=preset,
        targets=targets,
        rank=rank,
        trained=sum(leaf.numel() for leaf in adapter.parameters.values()),
        tokens=rows[0].tokens,
        images=rows[0].images,
        learnt=rows[0].targets,
        step_seconds=sum(row.seconds for row in timed) / len(timed),
        pack_seconds=pack_seconds,
        bound_seconds=3 * step_flops(config, step, preset_tensors(preset)) / (rate * 1e12),
        weight_bytes=weights,
        peak_bytes=peak,
        loss=tuple(row.loss for row in rows),
    )


def as_text(machine: dict[str, str], rate: float, numbers: Numbers) -> str:
    """The numbers for people."""
    seconds = numbers.step_seconds
    return "\n".join(
        [
            ", ".join(f"{name} {value}" for name, value in machine.items()),
            f"{numbers.preset}, rank {numbers.rank} on {', '.join(numbers.targets)}: {numbers.trained:,} numbers",
            f"a step: {numbers.tokens:,} tokens, {numbers.images} images of {GRID[0]}x{GRID[1]} patches, "
            f"{numbers.learnt:,} tokens learnt, {seconds:.2f} s, of which the host packs {numbers.pack_seconds:.2f} s",
            f"{numbers.tokens / seconds:,.0f} tokens/s, {numbers.images / seconds:.1f} images/s",
            f"{numbers.bound_seconds / seconds:.1%} of {rate:.0f} TFLOP/s, the measured bf16 product "
            f"(bound {numbers.bound_seconds:.2f} s)",
            f"memory: {numbers.weight_bytes / 1e9:.2f} GB of weights, {numbers.peak_bytes / 1e9:.2f} GB at the peak",
            f"loss by step: {', '.join(f'{loss:.3f}' for loss in numbers.loss)}",
        ]
    )


def run(argv: Sequence[str]) -> int:
    """Print the numbers, and save them if asked."""
    parser = argparse.ArgumentParser(prog="spyglass bench train", description=__doc__)
    parser.add_argument("--preset", choices=SIZES, default="flash-4layer", help="size of the model")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--tokens", type=positive, default=16384, help="tokens of a step (default 16384)")
    parser.add_argument("--steps", type=positive, default=4, help="timed steps (default 4)")
    parser.add_argument("--rank", type=positive, default=16, help="rank of every adapter (default 16)")
    parser.add_argument(
        "--profile", metavar="FILE", type=Path, help="write where the time of one more forward and backward goes"
    )
    parser.add_argument("--save", metavar="FILE", nargs="?", const="", help=f"write JSON (default below {RESULTS})")
    args = parser.parse_args(argv)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    machine = describe_machine()
    if device.type == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name(device)}
    rate = matmul_tflops(device, size=8192 if device.type == "cuda" else 1024, runs=10)
    numbers = measure(
        args.preset,
        device,
        tokens=args.tokens,
        steps=args.steps,
        rank=args.rank,
        rate=rate,
        profile=args.profile,
    )
    print(as_text(machine, rate, numbers))
    if args.save is not None:
        path = Path(args.save) if args.save else None
        save_numbers("train", machine, {"tflops": rate, "results": asdict(numbers)}, path)
    return 0
