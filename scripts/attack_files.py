"""Damaged checkpoints, configurations, adapters and tokenizers: each is read, or refused in our words.

`python -m scripts.attack_files SEED SECONDS` waits and prints as `scripts.attackers` does; times are of a processor.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.attackers import Tally, adapter, damaged, mutated
from spyglass.checkpoint.safetensors import open_checkpoint
from spyglass.config import read_model_config
from spyglass.config.presets import config_of, preset_config
from spyglass.config.shipped import find_model
from spyglass.errors import SpyglassError
from spyglass.lora.peft import read_adapter
from spyglass.params.table import most_tensors
from spyglass.prompt.tokenizer import load_tokenizer


def attack_files(seed: int, seconds: float) -> Tally:
    """Checkpoints, configurations, adapters and tokenizers that are damaged: each is read or refused in our words."""
    source, tally = random.Random(f"{seed} files"), Tally()
    shipped = find_model("spyglass-tiny-v4")
    like = next(path.parent for path in shipped.rglob("adapter_config.json"))
    tokenizer = json.loads((shipped / "tokenizer.json").read_text())
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)

        def config() -> None:
            values = mutated(source, preset_config(source.choice(("tiny", "tiny-v41")), packed=True), 0.03)
            (folder / "config.json").write_text(json.dumps(values))
            read_model_config(folder)

        def checkpoint() -> None:
            count = source.choice((3, 3000, 40_000))
            entry: Mapping[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
            header = json.dumps({f"a{n}": mutated(source, entry) if n < 20 else entry for n in range(count)}).encode()
            header = source.choice(
                (header, damaged(source, header), b"[" * 100 * count, b'{"a":[' + b"[]," * 30 * count)
            )
            (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
            open_checkpoint(folder, most_tensors(config_of("tiny")))

        def pairs() -> None:
            adapter(source, folder / "adapter", like)
            read_adapter(folder / "adapter", config_of("tiny"))

        def text() -> None:
            changed = {name: value for name, value in tokenizer.items() if name not in ("model", "added_tokens")}
            model = {name: value for name, value in tokenizer["model"].items() if name not in ("vocab", "merges")}
            changed, model = ({key: mutated(source, one) for key, one in some.items()} for some in (changed, model))
            whole = tokenizer | changed | {"model": tokenizer["model"] | model}
            whole |= source.choice(
                ({}, {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, {"truncation": 3})
            )
            (folder / "tokenizer.json").write_text(json.dumps(whole))
            load_tokenizer(folder)

        readers: Sequence[Callable[[], None]] = (config, checkpoint, pairs, text)
        while time.monotonic() < until:
            read = source.choice(readers)
            began = time.process_time()
            try:
                read()
                tally.seen[f"{read.__name__} read"] += 1
            except SpyglassError:
                tally.seen[f"{read.__name__} refused"] += 1
                tally.took(read.__name__, time.process_time() - began)
            except Exception as error:
                tally.wrong.append(f"{read.__name__}: {type(error).__name__}: {str(error)[:300]}")
    return tally


if __name__ == "__main__":
    print("ready", flush=True)
    sys.stdin.readline()
    attack_files(int(sys.argv[1]), float(sys.argv[2])).print()
