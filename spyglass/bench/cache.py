"""Time to the first token of a prompt with an image: cold, repeated, and with another question behind its beginning.

Cold prompts differ in their first token and in the image's pixels, so that nothing of them can be known.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from PIL import Image

from spyglass.bench.machine import add_folder, announce, positive, save_numbers
from spyglass.bench.model import FORMATS, WeightFormat, checkpoint_folder
from spyglass.config.engine import EngineConfig
from spyglass.config.model import ModelConfig
from spyglass.config.presets import PRESETS, Preset
from spyglass.engine.engine import Engine
from spyglass.engine.request import SamplingParams
from spyglass.engram.feed import EngramFeed
from spyglass.engram.store import open_engram
from spyglass.model import load_model
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Prompt

GOAL = 10  # times sooner that a repeated prompt should answer
_TAIL = 40  # tokens of the question behind the image
_IMAGE = (800, 600)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """Medians in milliseconds. `asked_again` has another last question of `_TAIL` tokens; `*_cached` count tokens."""

    preset: str
    tokens: int
    image_tokens: int
    cold_ms: float
    repeated_ms: float
    asked_again_ms: float
    repeated_cached: int
    asked_again_cached: int

    @property
    def sooner(self) -> float:
        """How many times sooner a repeated prompt answers."""
        return self.cold_ms / self.repeated_ms


def run(argv: Sequence[str]) -> int:
    """Print a line per preset; writes the checkpoints first if they are not there."""
    parser = argparse.ArgumentParser(prog="spyglass bench cache", description=__doc__)
    add_folder(parser)
    parser.add_argument("--presets", choices=PRESETS, nargs="*", default=["tiny", "mini"], help="random models")
    parser.add_argument("--weights", choices=FORMATS, default="packed", help="format of their weights")
    parser.add_argument("--tokens", type=positive, default=2000, help="length of the prompt, image included")
    parser.add_argument("--rounds", type=positive, default=5, help="prompts, each cold and then again")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads")
    parser.add_argument("--output", type=Path, help="write the numbers to this JSON file")
    args = parser.parse_args(argv)
    machine = announce(args.threads)
    results = [measure(args.folder, preset, args.weights, args.tokens, args.rounds) for preset in args.presets]
    if args.output:
        rows = [asdict(result) | {"sooner": result.sooner} for result in results]
        save_numbers("cache", machine, {"results": rows}, args.output)
    return 0


def measure(folder: Path, preset: Preset, weights: WeightFormat, tokens: int, rounds: int) -> FirstToken:
    """Run `rounds` prompts of `tokens` tokens, each three times, and print the medians."""
    path = checkpoint_folder(folder, preset, weights)
    loaded = load_model(path, dtype="bfloat16", progress=False)
    config = replace(loaded.config, text=replace(loaded.config.text, max_position_embeddings=1 << 20))
    engram = None
    if config.text.engram is not None:
        engram = EngramFeed(open_engram(path, config), device=loaded.device, dtype=loaded.dtype)
    engine = Engine(
        loaded.model,
        config,
        EngineConfig(),
        dtype=loaded.dtype,
        device=loaded.device,
        engram=engram,
        stored_rows=loaded.stores_rows,
    )
    first_token(engine, make_prompt(config, tokens, seed=0))  # kernels, memory
    times: list[tuple[float, float, float]] = []
    for seed in range(1, rounds + 1):
        prompt = make_prompt(config, tokens, seed=seed)
        cold, known = first_token(engine, prompt)
        assert known == 0, "a prompt that should be new was known"
        repeated, repeated_cached = first_token(engine, prompt)
        again, again_cached = first_token(engine, make_prompt(config, tokens, seed=seed, question=1))
        times.append((cold, repeated, again))
    cold_ms, repeated_ms, again_ms = (1e3 * median(each) for each in zip(*times, strict=True))
    result = FirstToken(
        preset=preset,
        tokens=len(prompt),
        image_tokens=int((prompt.kinds_T >= 0).sum()),
        cold_ms=cold_ms,
        repeated_ms=repeated_ms,
        asked_again_ms=again_ms,
        repeated_cached=repeated_cached,
        asked_again_cached=again_cached,
    )
    print(
        f"{preset:>8} {result.tokens} tokens, {result.image_tokens} of an image; first token cold {cold_ms:.1f} ms, "
        f"repeated {repeated_ms:6.1f} ms ({result.sooner:.0f}x sooner, goal {GOAL}x; {repeated_cached} tokens cached), "
        f"another question {again_ms:6.1f} ms ({again_cached} cached)",
        flush=True,
    )
    return result


def first_token(engine: Engine, prompt: Prompt) -> tuple[float, int]:
    """Seconds until a prompt's first token, and how many of its tokens were cached."""
    started = time.perf_counter()
    engine.add(prompt, SamplingParams(temperature=0, max_tokens=1))
    while True:
        for delta in engine.step():
            if delta.output is not None:
                return time.perf_counter() - started, delta.output.usage.cached_tokens


def make_prompt(config: ModelConfig, tokens: int, seed: int, question: int = 0) -> Prompt:
    """Random text around a random image, `tokens` tokens in all; other seeds share nothing."""
    random = np.random.default_rng(seed)
    image = Image.fromarray(random.integers(0, 256, (_IMAGE[1], _IMAGE[0], 3), dtype=np.uint8))
    low, high = config.text.vocab_size // 8, config.text.vocab_size * 7 // 8
    placeholder = config.text.vocab_size - 1
    ask = np.random.default_rng([seed, question]).integers(low, high, _TAIL)
    bare = prompt_from_parts([[low], image, ask], config, placeholder=placeholder)
    before = np.append(random.integers(low, high, max(0, tokens - len(bare))), low)
    before[0] = low + seed
    return prompt_from_parts([before, image, ask], config, placeholder=placeholder)
