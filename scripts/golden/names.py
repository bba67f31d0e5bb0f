"""Tensor names and shapes of transformers' own model, for `tests/unit/params/test_hf_names.py`.

`python -m scripts.golden.names` in an environment with transformers 5.24 rewrites `data/v4/transformers_names.json`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM

DATA = Path(__file__).resolve().parents[2] / "tests" / "golden" / "data"


def main() -> None:
    values = json.loads((DATA / "configs" / "v4-text.json").read_text())
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(DeepseekV4Config(**values))
    shapes = {name: list(tensor.shape) for name, tensor in sorted(model.state_dict().items())}
    lines = ",\n".join(f"{json.dumps(name)}: {shape}" for name, shape in shapes.items())
    (DATA / "v4" / "transformers_names.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
    main()
