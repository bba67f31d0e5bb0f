"""From a checkpoint folder to a `ModelConfig`: finds the file, its dialect and its family, by exact name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from spyglass.config import read_v4, read_v41
from spyglass.config.fields import Fields
from spyglass.config.json_file import read_json_object
from spyglass.config.model import ModelConfig
from spyglass.config.shipped import shipped_models
from spyglass.errors import ConfigError, did_you_mean
from spyglass.families import V4, V41

# `model_type` -> reader. Whole names only: one family's name may begin with another's.
READERS: Mapping[str, Callable[[Fields], ModelConfig]] = {
    V4.name: read_v4.read_official,
    V41.name: read_v41.read_official,
}
_ONLY_V41 = ("kv_source_layers", "engram_layer_ids")  # fields of the reference file that V4 does not have


def read_model_config(folder: str | os.PathLike[str]) -> ModelConfig:
    """Read a checkpoint folder's `config.json`, or the reference code's `inference/config.json` if that is all it has.

    Raises:
        ConfigError: no readable configuration, an unknown family, or a field that is missing, malformed or unsupported;
            the message names file and field.
    """
    path = Path(folder)
    if not os.path.isdir(path):  # unlike pathlib, also says no to a name that is too long or may not be looked up
        shipped = shipped_models()
        named = f", the name of a shipped model ({', '.join(shipped)})" if shipped else ""
        near = did_you_mean(str(path), shipped)
        raise ConfigError(
            f"{path}: not a folder; give the folder that holds the checkpoint's config.json{named} or a hub id "
            f"(ORG/NAME){near}"
        )
    official, reference = path / "config.json", path / "inference" / "config.json"
    found = official if os.path.lexists(official) or not os.path.lexists(reference) else reference
    if not os.path.lexists(found) and os.path.lexists(path / "adapter_config.json"):
        raise ConfigError(f"{path} is an adapter and no checkpoint; name the model it was made for, and it with --lora")
    return parse_model_config(read_json_object(found), str(found))


def parse_model_config(values: Mapping[str, object], file: str) -> ModelConfig:
    """The same from an already parsed object; `file` is what errors call it.

    Raises:
        ConfigError: as `read_model_config`.
    """
    if "model_type" not in values and {"dim", "n_layers"} <= values.keys():
        if any(name in values for name in _ONLY_V41):
            return read_v41.read_reference(Fields(file=file, values=values, written=read_v41.REFERENCE_NAMES))
        return read_v4.read_reference(Fields(file=file, values=values, written=read_v4.REFERENCE_NAMES))
    fields = Fields(file=file, values=values)
    supported = "one of the supported families: " + ", ".join(READERS)
    family = fields.get("model_type")
    if not isinstance(family, str) or family not in READERS:
        raise fields.error("model_type", supported)
    return READERS[family](fields)
