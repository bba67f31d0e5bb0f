"""Adapters through `peft` on transformers' `deepseek_v4`: one that peft wrote, and one that Spyglass wrote.

Needs transformers and peft, which the tests do not.

python -m scripts.golden.lora
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from scripts.golden.transformers_logits import state
from spyglass.lora.write import write_adapter
from tests.golden.lora_case import COLUMNS, LENGTHS, SEED, SQUARE, config, our_adapter, prompt, values, weights

TARGET = Path(__file__).resolve().parents[2] / "tests" / "golden" / "data" / "lora"
# o_a_proj is block-diagonal: peft merges a pair there, but cannot run it beside the weight
TARGETS = ["self_attn.q_a_proj", "self_attn.q_b_proj", "o_b_proj", "compressor.kv_proj", "gate_proj", "down_proj"]
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PATTERNS = {"model.layers.1.mlp.experts.gate_up_proj": 4, "layers.2.self_attn.q_b_proj": 5}
ALPHAS = {"model.layers.1.mlp.experts.gate_up_proj": 3, "layers.3.mlp.experts.down_proj": 9}


def base(square: bool) -> DeepseekV4ForCausalLM:
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**copy.deepcopy(values(square)))).float().eval()
    missing, unexpected = model.load_state_dict(state(weights(square)), strict=False)
    print("missing", missing, "unexpected", unexpected)
    return model


def logits(model: torch.nn.Module) -> dict[str, np.ndarray]:
    out = {}
    for length in LENGTHS:
        found = model(input_ids=torch.from_numpy(prompt(length))[None], use_cache=False).logits[0].numpy()
        out[str(length)] = found[:, COLUMNS]
    return out


def peft_writes(name: str) -> None:
    """Random pairs of peft's own making, saved by it; logits with the pairs beside the weights."""
    torch.manual_seed(SEED)
    asked = LoraConfig(
        r=2,
        lora_alpha=5,
        target_modules=TARGETS,
        target_parameters=PARAMETERS,
        rank_pattern=PATTERNS,
        alpha_pattern=ALPHAS,
        init_lora_weights=False,
        use_rslora=name == "square",
    )
    model = get_peft_model(base(SQUARE[name]), asked).eval()
    folder = TARGET / f"peft-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    np.savez_compressed(TARGET / f"peft-{name}.npz", **logits(model))


def peft_reads(name: str) -> None:
    """Logits of an adapter that `write_adapter` wrote, loaded and merged by peft."""
    model, adapter = base(SQUARE[name]), our_adapter(SQUARE[name])
    plain = logits(model)
    with tempfile.TemporaryDirectory() as folder:
        write_adapter(folder, adapter, names="hf", num_experts=config(SQUARE[name]).text.n_routed_experts)
        with safe_open(Path(folder) / "adapter_model.safetensors", "np") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}
        written = {"config": json.loads((Path(folder) / "adapter_config.json").read_text()), "shapes": shapes}
        (TARGET / f"ours-{name}.json").write_text(json.dumps(written, indent=1) + "\n")
        loaded = PeftModel.from_pretrained(model, folder).merge_and_unload()
    found = logits(loaded)
    print(name, {n: (float(np.abs(found[n] - plain[n]).max()), float(found[n].std())) for n in found})
    np.savez_compressed(TARGET / f"ours-{name}.npz", **found)


def main() -> None:
    torch.set_grad_enabled(False)
    TARGET.mkdir(exist_ok=True)
    for name in SQUARE:
        peft_writes(name)
        peft_reads(name)
    print(json.dumps({"transformers": transformers.__version__, "peft": peft.__version__}))


if __name__ == "__main__":
    main()
