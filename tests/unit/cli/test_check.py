"""`spyglass check`: what a folder is, whether it would load, in two seconds, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spyglass.checkpoint.random import new_checkpoint
from spyglass.cli.main import main
from spyglass.errors import CheckpointError
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.lora.write import write_adapter
from spyglass.machine import Device, Machine
from tests.unit.checkpoint.small_files import Raw, load_all, read_raw, write_raw, write_small


def check(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["check", str(folder), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flash")
    new_checkpoint(folder, "flash-vision", headers_only=True)
    return folder


def test_the_released_shape(flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = check(flash, capsys)
    assert code == 0 and report["would_load"] and report["faults"] == []
    assert report["family"] == "deepseek_v4" and report["draft"] == "dspark"
    assert report["tensors"] == 72_633 and report["bytes"] == 167_811_372_792 and report["files"] == 48
    assert report["groups"]["text"] == {"tensors": 67_658, "bytes": 156_015_745_244}
    assert report["groups"]["draft"] == {"tensors": 4_708, "bytes": 10_862_841_372}
    assert report["model"]["layers_by_ratio"] == {"0": 2, "4": 21, "128": 20}
    assert report["formats"]["fp4 1x32"] == 43 * 256 * 3
    assert report["memory"]["cache"]["bfloat16"]["per_token"] == 6880
    assert len(report["sparse_files"]) == 48
    assert "sparse_attention" in report["ops"]["cpu bfloat16"]
    assert report["vision_graphs"] == ("cuda bfloat16" in report["ops"])


def test_the_released_shape_is_checked_without_torch(flash: Path) -> None:
    program = (
        "import sys; from spyglass.cli.main import main; code = main(['check', sys.argv[1]]); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(flash)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_text_says_what_people_ask(flash: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(flash)]) == 0
    text = capsys.readouterr().out
    for expected in (
        "deepseek_v4, image tower of 32 layers",
        "72,633, 167.81 GB in 48 files",
        "dspark, not loaded",
        "6,880 bytes per token",
        "mostly holes",
        "141 GB",
        "would load: yes",
    ):
        assert expected in text


def test_a_model_larger_than_this_machine_is_said_to_be(
    flash: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sound files are exit code 0 all the same: people check where a model would fit before they rent it."""
    for free, ending in (
        (100, "would load: yes, once its files hold values, but not into this machine's free memory\n"),
        (900, "would load: yes, once its files hold values\n"),
    ):
        machine = Machine(Device("this machine's memory", 900 * 10**9, free * 10**9), ())
        monkeypatch.setattr("spyglass.machine.this_machine", lambda machine=machine: machine)
        assert main(["check", str(flash), "--plan"]) == 0
        assert capsys.readouterr().out.endswith(ending)


def test_fits_and_runs_are_two_words_and_speed_is_what_memory_allows(
    flash: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cards = tuple(Device("Card", 192 * 2**30, 190 * 2**30) for _ in range(2))
    monkeypatch.setattr(
        "spyglass.machine.this_machine",
        lambda: Machine(Device("this machine's memory", 900 * 10**9, 800 * 10**9), cards),
    )
    monkeypatch.setattr("spyglass.cli.check_plan.read_rate", lambda: 460e9)
    for known in ("measured", "compiles, not run"):
        monkeypatch.setattr("spyglass.cli.check.standings", lambda known=known: {"Card (9.9)": known})
        monkeypatch.setattr("spyglass.cli.check.hosted_experts", lambda *args, **options: [])
        assert main(["check", str(flash), "--plan"]) == 0
        lines = capsys.readouterr().out.splitlines()
        here = next(place for place, line in enumerate(lines) if line.startswith("this machine's memory: fits"))
        assert "conversations of 8k at once" in lines[here] and lines[here + 1].startswith("  runs: yes, on ")
        assert "at 460 GB/s (measured now) at most" in lines[here + 2]
        two = next(place for place, line in enumerate(lines) if line.startswith("2 x Card (--tensor-parallel-size 2)"))
        assert "fits" in lines[two] and "have not been run by us" in lines[two + 1]
        assert any("a machine without a GPU needs 1" in line and "fine-tuning" in line for line in lines)
    monkeypatch.setattr("spyglass.machine.this_machine", lambda: Machine(Device("m", 9, 9), cards[:1]))
    for known, word in (
        ("measured", "runs: yes, on Triton kernels"),
        ("not known", "runs: not known, kernels not known"),
    ):
        monkeypatch.setattr("spyglass.cli.check.standings", lambda known=known: {"Card (9.9)": known})
        assert main(["check", str(flash), "--plan"]) == 0
        assert word in capsys.readouterr().out


def test_the_speed_that_memory_allows_counts_what_a_token_reads(
    flash: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of V4-Flash some 13 billion of 284 billion weights: 6 experts of 256, and all that is dense."""
    assert main(["check", str(flash), "--plan", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    speed, stored = report["speed"], report["memory"]["weights"]
    dense = stored["divided"]["stored"] + stored["copied"]["stored"]
    experts = stored["experts"]["stored"] * 6 / 256
    assert experts < speed["token_bytes"] < experts + dense
    assert speed["tokens_per_second"] == pytest.approx(speed["bytes_per_second"] / speed["token_bytes"])
    assert speed["bytes_per_second"] > 1e8


def test_what_fits_everywhere_needs_no_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_checkpoint(tmp_path / "tiny", "tiny", headers_only=True)
    assert main(["check", str(tmp_path / "tiny")]) == 0
    text = capsys.readouterr().out
    assert "16k tokens everywhere, from one of 24 GB on" in text and "141 GB" not in text
    assert "809.5 kB" in text and "0.00 GB" not in text


@pytest.mark.parametrize("stranger", [False, True])
def test_an_adapter_is_judged_and_counted(stranger: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"layers.{9 if stranger else 1}.attn.wq_a"
    pair = LowRank(a_RI=torch.ones(7, 128), b_OR=torch.ones(128, 7), alpha=1.0)
    new_checkpoint(tmp_path / "tiny", "tiny", headers_only=True)
    write_adapter(tmp_path / "own", AdapterFile(modules={name: pair}), base_model="Other" if stranger else "tiny")
    code = main(["check", str(tmp_path / "tiny"), "--lora", str(tmp_path / "own"), "--lora", str(tmp_path / "own")])
    text, err = capsys.readouterr()
    assert ("the adapter own was made for 'Other', this is 'tiny'" in err) == stranger
    if stranger:
        assert code == 1 and "0 of 1 modules" in text and "would load: NO" in text
    else:
        assert code == 0 and f"adapters: {2 * 7 * (4 * 256 + 8) / 1e3:.1f} kB beside the weights" in text


def test_missing_kernels_are_explained(
    flash: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spyglass.ops.build.find_compiler", lambda: None)
    assert main(["check", str(flash)]) == 0
    assert "cannot run: no C++ compiler was found" in capsys.readouterr().out


# The verdict is that of the loader, whatever is wrong.
DAMAGES = {
    "nothing": lambda t: None,
    "missing": lambda t: t.pop("layers.2.attn.wo_b.weight"),
    "missing scale": lambda t: t.pop("layers.2.attn.wo_b.scale"),
    "missing tower": lambda t: t.pop("aligner.w2.bias"),
    "unused bias missing": lambda t: t.pop("layers.0.ffn.gate.bias"),
    "left over": lambda t: t.update({"layers.4.attn.attn_sink": Raw("F32", (1,), bytes(4))}),
    "draft": lambda t: t.update({"mtp.0.e_proj.weight": Raw("BF16", (1,), bytes(2))}),
    "misshapen": lambda t: t.update({"norm.weight": Raw("BF16", (47,), bytes(94))}),
    "wrong dtype": lambda t: t.update({"norm.weight": Raw("F64", (48,), bytes(384))}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_exit_code_is_the_loader_s_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    write_small(tmp_path)
    tensors = read_raw(tmp_path)
    DAMAGES[damage](tensors)
    write_raw(tmp_path, tensors, files=2)
    try:
        load_all(tmp_path)
        fault = None
    except CheckpointError as error:
        fault = str(error)
    code, report = check(tmp_path, capsys)
    assert code == (0 if fault is None else 1)
    assert all(line in (fault or "") for line in report["faults"]) and bool(report["faults"]) == (fault is not None)


def test_a_truncated_shard_and_a_missing_config_are_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small(tmp_path)
    shard = next(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    code, report = check(tmp_path, capsys)
    assert code == 1 and "truncated" in report["faults"][0] and shard.name in report["faults"][0]
    (tmp_path / "config.json").unlink()
    code, report = check(tmp_path, capsys)
    assert code == 1 and "config.json" in report["faults"][0]
    assert main(["check", str(tmp_path)]) == 1
    assert "would load: NO" in capsys.readouterr().out


def test_a_tokenizer_that_the_model_would_refuse_is_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small(tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    assert "takes token ids and images, but no text" in capsys.readouterr().out
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert main(["check", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "tokenizer.json is not a tokenizer file" in text and "would load: NO" in text
    token = {"id": 2, "content": "<x>", "special": True, "normalized": False}
    token |= {"single_word": False, "lstrip": False, "rstrip": False}
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    content = {"version": "1.0", "added_tokens": [token], "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    code, report = check(tmp_path, capsys)
    assert code == 1 and "use the tokenizer of the vision checkpoint" in report["faults"][0]


def test_a_text_checkpoint_says_that_it_takes_no_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small(tmp_path, vision_n_layers=0)
    assert main(["check", str(tmp_path)]) == 0
    assert "text only, no images" in capsys.readouterr().out


def test_transformers_names_are_counted_in_the_same_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_small(tmp_path / "native")
    write_small(tmp_path / "hf", names="hf")
    native, hf = check(tmp_path / "native", capsys)[1], check(tmp_path / "hf", capsys)[1]
    sizes = [{group: entry["bytes"] for group, entry in report["groups"].items()} for report in (native, hf)]
    assert sizes[0] == sizes[1] and native["formats"] == hf["formats"] and hf["would_load"]


def test_what_is_known_of_the_kernels_is_said_of_each_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = [
        SimpleNamespace(name="NVIDIA H200", major=9, minor=0),
        SimpleNamespace(name="NVIDIA A40", major=8, minor=6),
        SimpleNamespace(name="Tesla V100", major=7, minor=0),
    ]
    machine = Machine(Device("RAM", 1 << 36, 1 << 36), tuple(Device(card.name, 1 << 36, 1 << 36) for card in cards))
    monkeypatch.setattr("spyglass.machine.this_machine", lambda: machine)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: cards[number])
    write_small(tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("Triton kernels on")] == [
        "Triton kernels on NVIDIA H200 (9.0): measured",
        "Triton kernels on NVIDIA A40 (8.6): compiles, not run",
        "Triton kernels on Tesla V100 (7.0): not known",
    ]
