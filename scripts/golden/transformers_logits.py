"""Logits of transformers' `deepseek_v4` for `oracle_case`, fp32. Needs transformers, which the tests do not.

python -m scripts.golden.transformers_logits
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from spyglass.params.hf_names import to_hf, to_stacked
from spyglass.quant.packed import Packed
from tests.golden.oracle_case import COLUMNS, LENGTHS, LONG, LONG_ROWS, VALUES, prompt, weights

TARGET = Path(__file__).resolve().parents[2] / "tests" / "golden" / "data" / "v4" / "transformers.npz"


def state(found: dict[str, Packed]) -> dict[str, torch.Tensor]:
    """Our weights under transformers' names, experts stacked."""
    out: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for name, packed in found.items():
        matrix = len(packed.shape) == 2 and not name.endswith(("_fn", ".ape", ".tid2eid"))
        native = f"{name}.weight" if matrix else name
        values = packed.data if native.endswith("tid2eid") else packed.data.float()
        part = to_stacked(native)
        if part is None:
            out[to_hf(native)] = values
        else:
            stacks.setdefault(part.name, {})[part.expert, part.part] = values
    for name, parts in stacks.items():
        experts = 1 + max(expert for expert, _ in parts)
        count = 1 + max(part for _, part in parts)
        out[name] = torch.stack([torch.cat([parts[e, p] for p in range(count)]) for e in range(experts)])
    return out


def main() -> None:
    torch.set_grad_enabled(False)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**copy.deepcopy(VALUES))).float().eval()
    missing, unexpected = model.load_state_dict(state(weights()), strict=False)
    print("missing", missing, "unexpected", unexpected)

    def logits(length: int) -> np.ndarray:
        return model(torch.from_numpy(prompt(length))[None], use_cache=False).logits[0].numpy()

    last = np.stack([logits(length)[-1] for length in LENGTHS])
    long = logits(LONG)[LONG_ROWS]
    print(transformers.__version__, "standard deviation", last.std(), long.std())
    np.savez_compressed(
        TARGET,
        last=last[:, COLUMNS],
        last_argmax=last.argmax(-1).astype(np.int16),
        long=long[:, COLUMNS],
        long_argmax=long.argmax(-1).astype(np.int16),
    )


if __name__ == "__main__":
    main()
