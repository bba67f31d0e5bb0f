"""Engram rows of a prompt from mapped tables, warm and cold, next to the prefill they belong to.

The tables are written once (random bytes). Warm: their pages are in memory. Cold: the kernel has dropped them.
"""

from __future__ import annotations

import argparse
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from json import dumps
from pathlib import Path

import numpy as np
import torch

from spyglass.bench.machine import add_folder, announce, positive
from spyglass.bench.model import checkpoint_folder, prefill_rate
from spyglass.checkpoint.safetensors import read_header
from spyglass.config.model import EngramConfig
from spyglass.engram import EngramStore, hash_constants, open_tables, table_primes
from spyglass.engram.feed import EngramFeed
from spyglass.model import load_model

TOKENS = 2048
TABLE_BYTES = 4_000_000_000
VOCAB = 129_280
COLUMNS, ROW_BYTES = 24, 264  # as released: 3 sizes of n-grams x 8 heads, 256 codes and 8 scales
WARM_ROUNDS = 7
_ROWS_WRITTEN = 1 << 16


def run(argv: Sequence[str]) -> int:
    """Print gather times and the share of a prefill; writes tables and checkpoint first if they are not there."""
    parser = argparse.ArgumentParser(prog="spyglass bench engram", description=__doc__)
    add_folder(parser)
    parser.add_argument("--bytes", type=positive, default=TABLE_BYTES, help="size of both tables together")
    parser.add_argument("--tokens", type=positive, default=TOKENS, help="prompt length")
    parser.add_argument(
        "--weights", choices=("packed", "bf16"), default="packed", help="format of the model next to it"
    )
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads")
    args = parser.parse_args(argv)
    announce(args.threads)
    store = open_store(args.folder, args.bytes)
    forget(table_file(args.folder, args.bytes))
    feed = EngramFeed(store, device=torch.device("cpu"), dtype=torch.bfloat16)
    cold = gather_seconds(feed, args.tokens, seed=0)
    gather_seconds(feed, args.tokens, seed=1)
    warm = min(gather_seconds(feed, args.tokens, seed=1) for _ in range(WARM_ROUNDS))
    rows = args.tokens * COLUMNS * len(store.tables)
    print(
        f"{store.nbytes / 1e9:.2f} GB of tables, {args.tokens} tokens, {rows:,} rows, {rows * ROW_BYTES / 1e6:.1f} MB"
    )
    print(f"warm {warm * 1e3:8.1f} ms  {rows * ROW_BYTES / warm / 1e9:6.2f} GB/s")
    print(f"cold {cold * 1e3:8.1f} ms  {rows * ROW_BYTES / cold / 1e9:6.2f} GB/s")
    folder = checkpoint_folder(args.folder, "mini-v41", args.weights)
    loaded = load_model(folder, dtype="bfloat16", images=False, progress=False)
    seconds = args.tokens / prefill_rate(loaded, folder, args.tokens)
    print(f"prefill of mini-v41 {args.weights}: {seconds * 1e3:.1f} ms")
    print(f"gathering takes {warm / seconds:.1%} of it warm, {cold / seconds:.1%} cold")
    return 0


def gather_seconds(feed: EngramFeed, tokens: int, seed: int) -> float:
    """Seconds from token ids to decoded rows of both layers."""
    ids = np.random.default_rng(seed).integers(0, VOCAB, tokens).astype(np.int32)
    text, start = np.full(tokens, -1, np.int8), np.full((1, 3), -1, np.int32)
    started = time.perf_counter()
    feed.start(ids, text, start, np.array([0, tokens], np.int32))()
    return time.perf_counter() - started


def open_store(folder: Path, nbytes: int) -> EngramStore:
    """Both tables of a random engram of about `nbytes`, mapped; written if they are not there."""
    config, path = sized_config(nbytes), table_file(folder, nbytes)
    if not path.exists():
        print(f"writing {path}", flush=True)
        write_tables(path, config)
    return EngramStore(
        config=config,
        classes_V=(np.arange(VOCAB) % config.num_classes).astype(np.int32),
        constants=hash_constants(config),
        tables=open_tables(read_header(path), config),
        placement="mmap",
    )


def table_file(folder: Path, nbytes: int) -> Path:
    """Where tables of that size are stored."""
    return folder / f"engram-{nbytes}.safetensors"


def sized_config(nbytes: int) -> EngramConfig:
    """The release's engram with smaller tables: two of about `nbytes` together."""
    config = EngramConfig(
        layers=(1, 4),
        num_rows=(0, 0),
        max_ngram=4,
        prime_above=max(nbytes // (2 * COLUMNS * ROW_BYTES), 2),
        num_heads=8,
        head_dim=256,
        pad_token_id=2,
        num_classes=99_092,
    )
    return replace(config, num_rows=tuple(map(sum, table_primes(config))))


def write_tables(path: Path, config: EngramConfig) -> None:
    """Random codes and scales in a safetensors file, a piece at a time."""
    shapes = {}
    for layer, rows in zip(config.layers, config.num_rows, strict=True):
        shapes[f"layers.{layer}.engram.embed.weight"] = ("F8_E4M3", [rows, config.head_dim])
        shapes[f"layers.{layer}.engram.embed.scale"] = ("F8_E8M0", [rows, config.head_dim // 32])
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in shapes.items():
        start, end = end, end + shape[0] * shape[1]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    raw = dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, random = path.with_suffix(".partial"), np.random.default_rng(0)
    with open(partial, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for dtype, shape in shapes.values():
            low, high = (0, 127) if dtype == "F8_E4M3" else (120, 128)  # no code is NaN
            for first in range(0, shape[0], _ROWS_WRITTEN):
                rows = min(_ROWS_WRITTEN, shape[0] - first)
                file.write(random.integers(low, high, (rows, shape[1]), np.uint8).tobytes())
    partial.replace(path)


def forget(path: Path) -> None:
    """Ask the kernel to drop a file's pages from memory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
