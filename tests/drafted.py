"""A tiny checkpoint with a draft stage, in Transformers' names."""

from __future__ import annotations

import json
from pathlib import Path

from spyglass.checkpoint.random import random_item
from spyglass.checkpoint.save import save_checkpoint
from spyglass.config.presets import preset_config
from spyglass.config.read import parse_model_config
from spyglass.params.table import draft_params, param_table


def write_drafted(folder: Path) -> None:
    """Config and packed weights of the preset `tiny`, and `mtp.0.*` of the kind that V4 has."""
    values = preset_config("tiny", packed=True) | {"num_nextn_predict_layers": 1}
    config = parse_model_config(values, "a drafted model")
    specs = param_table(config) | draft_params(config, "classic")
    items = [random_item(name, spec, seed=0, format=spec.format) for name, spec in specs.items()]
    save_checkpoint(folder, items, names="hf")
    (folder / "config.json").write_text(json.dumps(values))
