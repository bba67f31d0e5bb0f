"""A digest of a checkpoint that differs between checkpoints of one shape, from samples of it. Torch-free."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from spyglass.checkpoint.safetensors import TensorHeader, open_checkpoint
from spyglass.errors import CheckpointError

_SAMPLE_BYTES = 256  # of every tensor: one small read each, also where tensors have gigabytes
_BESIDE = ("config.json", "tokenizer.json")  # what else decides how a checkpoint answers


def checkpoint_digest(folder: Path) -> str:
    """32 hex digits: configuration, tokenizer, every tensor's name, dtype and shape, and the bytes in its middle.

    The folder's name, its shards and the order of tensors in them count for nothing.

    Raises:
        CheckpointError: as `open_checkpoint`, or a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    tensors = open_checkpoint(folder).tensors.values()
    try:
        for name in _BESIDE:
            content = (folder / name).read_bytes() if (folder / name).exists() else b""
            digest.update(hashlib.blake2b(content).digest())
        by_file: dict[Path, list[TensorHeader]] = {}
        for tensor in tensors:
            by_file.setdefault(tensor.file, []).append(tensor)
        samples: dict[str, bytes] = {}
        for file, held in by_file.items():
            with open(file, "rb", buffering=0) as stream:
                samples |= {tensor.name: _middle(stream.fileno(), tensor) for tensor in held}
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape} ".encode())
        digest.update(samples[tensor.name])
    return digest.hexdigest()


def _middle(descriptor: int, tensor: TensorHeader) -> bytes:
    size = min(_SAMPLE_BYTES, tensor.nbytes)
    return os.pread(descriptor, size, tensor.start + (tensor.nbytes - size) // 2)
