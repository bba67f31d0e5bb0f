"""PEFT folders: every spelling lands on its module, every tensor is accounted for, and the rest is refused by name."""

from __future__ import annotations

import cProfile
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from spyglass.errors import AdapterError
from spyglass.lora.config import MAX_PATTERNS, Patterns
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.lora.peft import read_adapter
from spyglass.lora.write import write_adapter
from spyglass.params.hf_names import to_hf
from spyglass.params.table import most_tensors
from tests.adapter_parts import random_adapter, small
from tests.tolerance import REWRITTEN, assert_close

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}
PREFIXES = [
    "",
    "base_model.model.",
    "base_model.model.model.",
    "base_model.model.language_model.model.",
    "base_model.model.model.language_model.",
    "base_model.model.language_model.",
]


def pair(module: str, rank: int = 2, out: int = 5, inner: int = 4, *, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"{module}.lora_A.weight": torch.randn(rank, inner), f"{module}.lora_B.weight": torch.randn(out, rank)}


def save(folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", ["attn.wq_b", "attn.indexer.wq_b", "ffn.experts.3.w1", "attn.compressor.wgate"])
def test_every_prefix_and_both_spellings_reach_the_same_module(prefix: str, name: str, tmp_path: Path) -> None:
    native = f"layers.3.{name}"
    for spelling in (native, to_hf(native).removeprefix("model.")):
        found = read_adapter(save(tmp_path / "a", pair(prefix + spelling)))
        assert list(found.modules) == [native], spelling
        assert found.modules[native].scale == 3.0


@pytest.mark.parametrize("name", ["vision.blocks.0.attn.wqkv", "vision.patch_embed.proj", "aligner.w2"])
def test_modules_of_pictures_are_read_below_every_prefix(name: str, tmp_path: Path) -> None:
    for prefix in PREFIXES[:4]:
        assert list(read_adapter(save(tmp_path / "a", pair(prefix + name))).modules) == [name]


def test_ranks_and_alphas_come_from_patterns_and_rslora_divides_by_the_root(tmp_path: Path) -> None:
    tensors = pair("model.layers.0.self_attn.q_a_proj", 4) | pair("model.layers.1.self_attn.q_a_proj")
    patterns = {"rank_pattern": {"layers.0.self_attn.q_a_proj": 4}, "alpha_pattern": {r"layers\.1\..*": 5}}
    found = read_adapter(save(tmp_path / "a", tensors, **patterns)).modules
    assert {name: (pair.rank, pair.scale) for name, pair in found.items()} == {
        "layers.0.attn.wq_a": (4, 1.5),
        "layers.1.attn.wq_a": (2, 2.5),
    }
    found = read_adapter(save(tmp_path / "b", tensors, use_rslora=True, **patterns)).modules
    assert found["layers.0.attn.wq_a"].scale == 3.0 and found["layers.1.attn.wq_a"].scale == 5 / 2**0.5


def test_the_first_pattern_that_fits_the_end_of_a_name_wins() -> None:
    patterns = Patterns(
        {"wq_a": 1, r".*\.1\.attn\.wq_a": 2, r"layers\.2\.attn\.wkv": 3, "(wkv|wo_b)": 4, "2.attn.wo_b": 5}
    )
    expected = {
        "0.attn.wq_a": 1,
        "1.attn.wq_a": 1,
        "2.attn.wkv": 3,
        "0.attn.wkv": 4,
        "2.attn.wo_b": 4,
        "0.attn.xwkv": 9,
    }
    assert {name: patterns.find(f"layers.{name}", 9) for name in expected} == expected


def test_a_pattern_that_is_read_ends_on_a_name_that_nearly_fits() -> None:
    """The slowest that are read. What tries more ways is refused (below)."""
    patterns = Patterns({r".*.*.*x": 1, r"(a|s).*\d+.*(q|w)": 2, r".*(0|1|2|3)\.(attn|ffn)\.(wq_a|wq_b)": 3})
    assert patterns.find("base_model.model.model.language_model.layers.123456.ffn.shared_experts.w1", 9) == 9
    assert patterns.find("layers.0.attn.wq_a", 9) == 3


def test_thousands_of_names_are_looked_up_not_tried() -> None:
    """A pattern for every expert of a large model: tried one by one, this would take minutes."""
    names = [f"layers.{layer}.ffn.experts.{expert}.w1" for layer in range(40) for expert in range(256)]
    patterns = Patterns({name: number for number, name in enumerate(names)})
    assert all(patterns.find(f"model.{name}", -1) == number for number, name in enumerate(names))


def test_stacked_experts_have_the_expert_slowest_in_a_and_fastest_in_b(tmp_path: Path) -> None:
    """Three experts of rank 2: flat B = [10, 20, 30, 11, 21, 31] gives [10, 11], [20, 21] and [30, 31]."""
    module = "base_model.model.model.layers.0.mlp.experts"
    a = torch.arange(6.0)[:, None].expand(6, 4).contiguous()
    tensors = {
        f"{module}.lora_A.weight": a,
        f"{module}.lora_B.weight": torch.tensor([[10.0, 20, 30, 11, 21, 31]]),
        f"{module}.base_layer.lora_A.weight": torch.ones(6, 3),
        f"{module}.base_layer.lora_B.weight": torch.stack([torch.full((6,), 1.0), torch.full((6,), 3.0)]),
    }
    found = read_adapter(save(tmp_path / "a", tensors, target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
    assert found.stacked == {"layers.0.ffn.experts": 3} and len(found.modules) == 9
    for expert in range(3):
        w1, w2, w3 = (found.modules[f"layers.0.ffn.experts.{expert}.{matrix}"] for matrix in ("w1", "w2", "w3"))
        assert w2.b_OR.tolist() == [[10.0 * (expert + 1), 10.0 * (expert + 1) + 1]]
        assert w2.a_RI[:, 0].tolist() == [2.0 * expert, 2.0 * expert + 1]
        assert w1.b_OR.tolist() == [[1.0, 1.0]] and w3.b_OR.tolist() == [[3.0, 3.0]], "gate rows first, then up"


def test_one_pair_of_stacked_experts_is_what_target_parameters_name(tmp_path: Path) -> None:
    module = "model.layers.0.mlp.experts"
    tensors = {f"{module}.lora_A.weight": torch.ones(6, 4), f"{module}.lora_B.weight": torch.ones(8, 6)}
    down = read_adapter(save(tmp_path / "a", tensors, target_parameters=["mlp.experts.down_proj"]))
    assert {name.rpartition(".")[2] for name in down.modules} == {"w2"}
    both = read_adapter(save(tmp_path / "a", tensors, target_parameters=["layers.0.mlp.experts.gate_up_proj"]))
    assert {name.rpartition(".")[2] for name in both.modules} == {"w1", "w3"}
    for named in ([], ["experts.gate_up_proj", "experts.down_proj"], ["layers.1.mlp.experts.down_proj"]):
        with pytest.raises(AdapterError, match="they must say which one it is"):
            read_adapter(save(tmp_path / "a", tensors, target_parameters=named))


MALFORMED = {
    "use_dora": [True],
    "lora_bias": [True],
    "bias": ["all"],
    "modules_to_save": [["head"]],
    "fan_in_fan_out": [True],
    "layer_replication": [[[0, 2]]],
    "trainable_token_indices": [[3]],
    "use_qalora": [True],
    "alora_invocation_tokens": [[1]],
    "something_new": [{"x": 1}],
    "init_lora_weights": ["pissa", "pissa_niter_4", "olora", "corda", "loftq", 3],
    "peft_type": ["LOHA"],
    "r": [0, "8"],
    "lora_alpha": [0, None, 10**400, 1e300, -1e-300],
    "use_rslora": ["yes"],
    "rank_pattern": [{"q": 0}, {"(": 2}, {".*" * 9 + "x": 2}, {r"(a)\1": 2}, {"[z-a]": 2}],
    "alpha_pattern": [
        {"q": "2"},
        {"wq_a": 10**400},
        {"(?i)WQ_A": 2},
        {"(([a-z0-9.]+)+)+x": 2},
        {"(a|a)*x": 2},
        {r"(\w|[a-z])" * 40 + "x": 2},
        {"(a|ab)?" * 40 + "x": 2},
        {"a?" * 40 + "x": 2},
        {f"a.*{number}": 2 for number in range(MAX_PATTERNS + 1)},
    ],
    "target_parameters": ["experts"],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field, value) for field, values in MALFORMED.items() for value in values],
)
def test_what_is_not_implemented_is_refused_by_the_name_of_its_field(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=rf"adapter_config\.json: {field} "):
        read_adapter(save(tmp_path / "a", pair("layers.0.attn.wq_a"), **{field: value}))


def test_a_number_of_thousands_of_digits_is_no_module(tmp_path: Path) -> None:
    for module in ("layers.0.ffn.experts.{}.w1", "layers.{}.attn.wq_a", "model.layers.{}.mlp.experts"):
        with pytest.raises(AdapterError, match="0 of 1 modules matched"):
            read_adapter(save(tmp_path / "a", pair(module.format("7" * 5000))))


def test_what_changes_nothing_is_accepted(tmp_path: Path) -> None:
    harmless = {
        "init_lora_weights": "gaussian",
        "lora_dropout": 0.1,
        "task_type": "CAUSAL_LM",
        "target_modules": "all-linear",
        "use_dora": False,
        "modules_to_save": None,
        "loftq_config": {},
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        "inference_mode": True,
    }
    assert read_adapter(save(tmp_path / "a", pair("layers.0.attn.wq_a"), **harmless)).counts() == {"attention": 1}


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("model.layers.0.mlp.gate", "routers take no adapter"),
        ("model.layers.0.ffn.gate", "routers take no adapter"),
        ("lm_head", "embedding and head"),
        ("model.embed_tokens", "embedding and head"),
        ("mtp.0.attn.wq_a", "draft stages"),
        ("model.layers.0.self_attn.k_proj", "unmatched: model.layers.0.self_attn.k_proj"),
        ("model.layers.0.q_a_proj", "unmatched"),
        ("transformer.layers.0.attn.wq_a", "unmatched"),
    ],
)
def test_a_module_that_takes_no_adapter_refuses_the_whole_adapter(module: str, reason: str, tmp_path: Path) -> None:
    tensors = pair(module) | pair("model.layers.0.self_attn.q_a_proj")
    with pytest.raises(AdapterError, match=f"1 of 2 modules matched.*{reason}"):
        read_adapter(save(tmp_path / "a", tensors))
    with pytest.raises(AdapterError, match="0 of 1 modules matched"):
        read_adapter(save(tmp_path / "b", pair(module)))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"layers.0.attn.wq_a.lora_A.weight": torch.ones(2, 4)}, "layers.0.attn.wq_a without lora_B"),
        (pair("layers.0.attn.wq_a") | {"layers.0.attn.wq_a.lora_magnitude_vector": torch.ones(5)}, "magnitude_vector"),
        (pair("layers.0.attn.wq_a") | {"layers.0.attn.wq_a.lora_B.bias": torch.ones(5)}, r"no lora_A or lora_B weight"),
        (pair("layers.0.attn.wq_a") | {"model.norm.weight": torch.ones(5)}, "model.norm.weight"),
        (pair("layers.0.attn.wq_a", 3), "not the rank 2"),
        (pair("layers.0.attn.wkv") | pair("model.layers.0.self_attn.kv_proj"), "two pairs for one module"),
        ({f"layers.0.attn.wq_a.lora_{s}.weight": torch.ones(2, 2).long() for s in "AB"}, "I64"),
        ({f"layers.0.attn.wq_a.lora_{s}.weight": torch.ones(2, 2, 2) for s in "AB"}, "expected a matrix"),
        ({k: v * float("nan") for k, v in pair("layers.0.attn.wq_a").items()}, "no finite number"),
        ({}, "0 of 0 modules"),
    ],
)
def test_tensors_that_make_no_pairs_are_refused(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=message):
        read_adapter(save(tmp_path / "a", tensors))


def test_damaged_folders_are_refused_before_values_are_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", pair("layers.0.attn.wq_a"))
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    for damaged in (b"", whole[:4], whole[:-1], whole + b"x", whole[:8] + b"{" + whole[9:-1]):
        file.write_bytes(damaged)
        with pytest.raises(AdapterError):
            read_adapter(folder)
    file.write_bytes((10**15).to_bytes(8, "little") + whole[8:])
    with pytest.raises(AdapterError, match="announces a header"):
        read_adapter(folder)
    with pytest.raises(AdapterError, match="no such folder"):
        read_adapter(tmp_path / "b")
    file.unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_model\.safetensors"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError, match="not valid JSON"):
        read_adapter(folder)
    with pytest.raises(AdapterError, match="is no adapter"):
        read_adapter(tmp_path / "nowhere")


def test_files_that_are_overwritten_later_do_not_change_what_was_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", pair("layers.0.attn.wq_a", seed=1))
    found = read_adapter(folder).modules["layers.0.attn.wq_a"]
    kept = found.a_RI.clone()
    file = folder / "adapter_model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(found.a_RI, kept)


@pytest.mark.parametrize("family", ["v4", "v41"])
@pytest.mark.parametrize("names", ["native", "hf"])
def test_what_is_written_reads_back_as_the_same_change(family: str, names: Any, tmp_path: Path) -> None:
    """Mixed ranks, alphas and kinds of scale; experts of which some have no pair."""
    world = small(family)
    groups = ["attention", "compressor", "indexer", "shared", "experts", "engram", "tower", "aligner"]
    modules: dict[str, LowRank] = {}
    for number, (name, found) in enumerate(random_adapter(world.shapes, groups, rank=3, seed=1).modules.items()):
        if ".experts.2." not in name and not name.endswith("experts.4.w3"):
            modules[name] = found
        if number % 5 == 0 and name in modules:
            smaller = random_adapter({name: world.shapes[name]}, groups, rank=2, alpha=3.0, seed=2).modules[name]
            modules[name] = smaller
    for mixed in (False, True):
        given = {
            name: LowRank(a_RI=p.a_RI, b_OR=p.b_OR, alpha=p.alpha, rslora=mixed and "w1" in name)
            for name, p in modules.items()
        }
        write_adapter(tmp_path / f"{mixed}", AdapterFile(modules=given), names=names, num_experts=6)
        read = read_adapter(tmp_path / f"{mixed}").modules
        for name, expected in given.items():
            change = expected.scale * expected.b_OR @ expected.a_RI
            assert_close(read[name].scale * read[name].b_OR @ read[name].a_RI, change, REWRITTEN, name)
        for name in read.keys() - given.keys():
            assert ".experts." in name and names == "hf" and not read[name].b_OR.any(), "zeros where there was none"


def test_an_empty_adapter_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="0 modules"):
        write_adapter(tmp_path / "a", AdapterFile(modules={}))
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterError, match="cannot be written"):
        write_adapter(
            tmp_path / "file",
            AdapterFile(
                modules={"layers.0.attn.wq_a": LowRank(a_RI=torch.ones(1, 2), b_OR=torch.ones(2, 1), alpha=1.0)}
            ),
        )


def test_whoever_may_read_new_files_may_read_those_of_an_adapter(tmp_path: Path) -> None:
    """Servers run as other users; the library that writes tensors makes its files private."""
    pair = LowRank(a_RI=torch.ones(1, 2), b_OR=torch.ones(2, 1), alpha=1.0)
    write_adapter(tmp_path, AdapterFile(modules={"layers.0.attn.wq_a": pair}))
    (tmp_path / "new").touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "new").stat().st_mode}


def test_h8_what_an_adapter_claims_is_compared_with_the_model_before_its_values_are_read(
    tmp_path: Path,
) -> None:
    """Its values are none, which whoever reads them says."""
    model = small("v4")
    text = model.config.text
    stack = "model.layers.0.mlp.experts"

    def experts(count: int) -> dict[str, torch.Tensor]:
        return {
            f"{stack}.lora_A.weight": torch.full((count, text.hidden_size), torch.nan),
            f"{stack}.lora_B.weight": torch.full((2 * text.moe_intermediate_size, count), torch.nan),
        }

    def empty(module: str) -> dict[str, torch.Tensor]:
        return {name: tensor * torch.nan for name, tensor in pair(module).items()}

    named: dict[str, Any] = {"r": 1, "target_parameters": ["mlp.experts.gate_up_proj"]}
    cases = {
        "10,000 experts of rank 1; a model has 4,096 at most": save(tmp_path / "a", experts(10_000), **named),
        rf"has {text.n_routed_experts} experts, the adapter 4000": save(tmp_path / "b", experts(4000), **named),
        "0 of 1 modules of the adapter matched": save(tmp_path / "c", empty("layers.99.attn.wq_a")),
        "the adapter was made for another model": save(tmp_path / "d", empty("layers.0.attn.wq_a"), r=2),
    }
    for message, folder in cases.items():
        with pytest.raises(AdapterError, match=message):
            read_adapter(folder, model.config)


def test_h8_an_adapter_with_far_more_tensors_than_the_model_is_refused_by_their_number(tmp_path: Path) -> None:
    model = small("v4").config
    count = 4 * most_tensors(model)
    names = {f"layers.{number}.attn.wq_a.lora_A.weight": torch.zeros(0) for number in range(count + 1)}
    with pytest.raises(AdapterError, match=r"far more than the .* tensors that this model can have"):
        read_adapter(save(tmp_path / "a", names), model)


def test_unmatched_modules_are_named_in_time_that_grows_with_their_number(tmp_path: Path) -> None:
    """Counted in calls of Python functions, which do not depend on the machine."""

    def calls(count: int) -> int:
        tensors = {k: v for number in range(count) for k, v in pair(f"layers.{number}.attn.nothing").items()}
        folder = save(tmp_path / str(count), tensors)
        profile = cProfile.Profile()
        with pytest.raises(AdapterError, match=f"0 of {count} modules matched"):
            profile.runcall(read_adapter, folder)
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(2000) < 2.5 * calls(1000)
