"""Fine-tuning from files to files: an adapter that is trained, stopped and resumed, loaded and served."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image

from spyglass.checkpoint.safetensors import open_checkpoint
from spyglass.cli.main import main
from spyglass.config.presets import Preset
from spyglass.config.shipped import shipped_models
from spyglass.config.training import TrainConfig
from spyglass.engine.llm import LLM
from spyglass.engine.request import SamplingParams
from spyglass.errors import AdapterError, ConfigError, PromptError
from spyglass.lora.peft import read_adapter
from spyglass.model import load_model
from spyglass.prompt.tokenizer import load_tokenizer
from spyglass.train.answers import MOST_TOKENS, answers, shown_chats
from spyglass.train.data import Learner, read_chats
from spyglass.train.finetune import finetune, open_engram_feed
from spyglass.train.log import duration, read_log
from spyglass.train.loss import step_logits, token_loss
from spyglass.train.packing import pack
from spyglass.train.state import held_alone
from tests.tolerance import RESTORED_LOSS, assert_close

pytestmark = pytest.mark.slow  # they load a checkpoint from disk
ALL = ("attention", "compressor", "shared", "experts", "tower", "aligner")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image and what it shows, and a chat without one."""
    folder = tmp_path_factory.mktemp("data")
    Image.new("RGB", (56, 56), "red").save(folder / "red.png")
    shown = {"type": "image_url", "image_url": {"url": "red.png"}}
    questions = [[shown, {"type": "text", "text": "Which colour?"}], "Name a colour."]
    lines = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Red."}]}
        for question in questions
    ]
    path = folder / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def config(tiny_folder: Path, data: Path, tmp_path: Path) -> TrainConfig:
    return TrainConfig(model=tiny_folder, data=data, output=tmp_path / "out", steps=2, rank=4, batch_tokens=150)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    pairs = read_adapter(folder).modules
    return {f"{name}.{part}": getattr(pair, part) for name, pair in pairs.items() for part in ("a_RI", "b_OR")}


def test_a_run_that_was_stopped_ends_as_one_that_was_not(config: TrainConfig, tmp_path: Path) -> None:
    config = replace(config, dropout=0.2, targets=ALL, steps=3)
    whole = replace(config, output=tmp_path / "whole")
    assert finetune(whole, progress=False).finished
    stopped = finetune(replace(config, minutes=0.0), progress=False)
    assert (stopped.step, stopped.finished) == (1, False)
    with pytest.raises(ConfigError, match="already holds a run"):
        finetune(config, progress=False)
    with pytest.raises(ConfigError, match="rank 4, this one has 8"):
        finetune(replace(config, rank=8, resume=True), progress=False)
    assert finetune(replace(config, resume=True), progress=False).finished
    a, b = tensors(whole.output), tensors(config.output)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    logs = [[row.loss for row in read_log(out / "training")] for out in (whole.output, config.output)]
    assert logs[0] == logs[1] and len(logs[0]) == 3


@pytest.mark.parametrize("preset", ["tiny", "tiny-v41"])
def test_a_whole_model_is_trained_into_a_checkpoint_that_answers_as_it_was_trained(
    preset: Preset, config: TrainConfig, data: Path, checkpoint_of: Callable[..., Path]
) -> None:
    """Packing loses nothing: the loss of the checkpoint that was written is the one that training would go on from."""
    config = replace(config, model=checkpoint_of(preset))
    config = replace(config, full=True, rank=16, lr=3e-3, batch_tokens=300, clip=100.0)
    assert finetune(config, progress=False).finished
    losses = [row.loss for row in read_log(config.output / "training")]
    assert losses[-1] < losses[0]
    before, after = (_loss_of(folder, data) for folder in (config.model, config.output))
    assert_close(before, losses[0], RESTORED_LOSS)
    assert after < losses[-1]
    if preset != "tiny":
        tables = [_tables(folder) for folder in (config.model, config.output)]
        assert tables[0].keys() == tables[1].keys() and tables[0]
        assert all(torch.equal(table, tables[1][name]) for name, table in tables[0].items()), (
            "memories stay as they are"
        )
        return
    gone = replace(config, output=config.output.with_name("cut"))
    assert not finetune(replace(gone, minutes=0.0), progress=False).finished
    assert finetune(replace(gone, resume=True), progress=False).finished
    for file in config.output.glob("*.safetensors"):
        assert file.read_bytes() == (gone.output / file.name).read_bytes(), "resumed as if it had never stopped"


def _tables(folder: Path) -> dict[str, torch.Tensor]:
    """The stored bytes of the memory tables."""
    tensors = [safetensors.torch.load_file(path) for path in folder.glob("*.safetensors")]
    return {n: t.view(torch.uint8) for found in tensors for n, t in found.items() if ".engram.embed" in n}


def _loss_of(folder: Path, data: Path) -> float:
    """Mean loss of all chats, by the serving model with the ops that serve."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    loaded = load_model(folder, ops="reference", progress=False)
    chats, _ = read_chats(data, Learner(loaded.config, tokenizer), most_tokens=300, progress=False)
    samples = [Learner(loaded.config, tokenizer).sample(chat.messages) for chat in chats]
    with torch.no_grad():
        step = pack(samples, loaded.config, engram=open_engram_feed(folder, loaded))
        loss, count = token_loss(step_logits(loaded.model, step), step.targets_R)
    return float(loss / count)


@pytest.fixture(scope="module")
def stopped(tiny_folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of two steps that was stopped after the first."""
    output = tmp_path_factory.mktemp("stopped") / "out"
    config = TrainConfig(model=tiny_folder, data=data, output=output, steps=2, rank=2, batch_tokens=150, minutes=0.0)
    assert not finetune(config, progress=False).finished
    return replace(config, resume=True)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dtype": "float32"}, "dtype bfloat16, this one has float32"),
        ({"numerics": "plain"}, "numerics reference, this one has plain"),
        ({"lr": 1e-3}, r"lr 0\.\d+, this one has 0\.001"),
        ({"dtype": "float32", "rank": 3}, "rank 2, this one has 3; with dtype bfloat16, this one has float32"),
    ],
)
def test_a_run_is_not_resumed_in_other_arithmetic(changes: dict[str, Any], told: str, stopped: TrainConfig) -> None:
    """All that differs is named; what "auto" stands for is no difference."""
    with pytest.raises(ConfigError, match=told):
        finetune(replace(stopped, **changes), progress=False)


def test_a_run_is_not_resumed_with_another_picture_of_the_same_name(stopped: TrainConfig, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stopped.data.parent, tmp_path / "data"))
    output = Path(shutil.copytree(stopped.output, tmp_path / "out"))
    moved = replace(stopped, data=folder / stopped.data.name, output=output)
    before = (folder / "red.png").read_bytes()
    Image.new("RGB", (56, 56), "blue").save(folder / "red.png")
    with pytest.raises(ConfigError, match=r"data [0-9a-f]{32}, this one has [0-9a-f]{32};"):
        finetune(moved, progress=False)
    (folder / "red.png").write_bytes(before)
    assert finetune(moved, progress=False).finished


def test_a_run_is_not_resumed_on_another_base_of_the_same_shape(
    stopped: TrainConfig, tiny_folder: Path, tmp_path: Path
) -> None:
    """One changed value in the middle of one tensor is another base; the same files elsewhere are not."""
    moved, other = (shutil.copytree(tiny_folder, tmp_path / name) for name in ("moved", "other"))
    tensor = open_checkpoint(other).tensors["norm.weight"]
    with tensor.file.open("r+b") as file:
        file.seek(tensor.start + tensor.nbytes // 2)
        file.write(b"\x00\x3f")
    with pytest.raises(ConfigError, match=r"base model [0-9a-f]{32}, this one has [0-9a-f]{32};"):
        finetune(replace(stopped, model=other), progress=False)
    output = Path(shutil.copytree(stopped.output, tmp_path / "out"))
    explicit = replace(stopped, model=moved, output=output, dtype="bfloat16", numerics="reference")
    assert finetune(explicit, progress=False).step == 2


def test_a_tower_learns_from_chats_of_which_only_some_have_pictures(config: TrainConfig) -> None:
    """A micro-batch without one adds nothing, and a step without one changes what moments are left to do."""
    config = replace(config, targets=("tower", "aligner"), warmup=0, lr=0.01, steps=4, batch_tokens=133)
    assert finetune(config, progress=False).finished
    rows = read_log(config.output / "training")
    assert sorted(row.images for row in rows) == [0, 0, 1, 1]
    assert all((row.norm > 0) == (row.images > 0) for row in rows)
    assert all(pair.b_OR.any() for name, pair in read_adapter(config.output).modules.items() if "aligner" in name)


@pytest.mark.parametrize("full", [False, True])
def test_answers_before_and_after_training_and_the_time_it_takes_are_told(config: TrainConfig, full: bool) -> None:
    rate = {"rank": 16, "lr": 3e-3, "batch_tokens": 300, "clip": 100.0} if full else {"lr": 0.03, "warmup": 0}
    told: list[str] = []
    config = replace(config, full=full, steps=30, schedule="constant", **rate)  # type: ignore[arg-type]
    finetune(config, tell=told.append, progress=False)
    (table,) = (line for line in told if line.startswith("answers before and after"))
    rows = [row.split(maxsplit=1) for row in table.splitlines()[1:]]
    assert rows[0] == ["[image]", "Which colour?"] and rows[4] == ["Name", "a colour."]
    for right, before, after in (rows[1:4], rows[5:8]):
        assert right == ["right", "Red."] and (before[0], after[0]) == ("before", "after")
        assert after[1].startswith("Red") and not "".join(before[1:]).startswith("Red"), "where it ends is not at stake"
    (expected,) = (line for line in told if line.startswith("expected: "))
    assert re.fullmatch(r"expected: 27 more steps of [\d.e-]+ s, about [\d.]+ (s|min|h) in all", expected)


def test_answers_that_are_told_are_those_of_the_engine(config: TrainConfig, data: Path) -> None:
    """The same greedy tokens through the training pass as through pages, for a chat with an image and one without."""
    llm = LLM(config.model, device="cpu", dtype="float32", numerics="plain")
    assert llm.tokenizer is not None
    learner = Learner(llm.config, llm.tokenizer)
    chats, _ = read_chats(data, learner, most_tokens=150, progress=False)
    loaded = load_model(config.model, device="cpu", dtype="float32", numerics="plain", ops="training")
    shown = shown_chats(chats, learner)
    said = answers(
        shown, lambda samples: step_logits(loaded.model, pack(samples, loaded.config, dtype=torch.float32)), learner
    )
    params = SamplingParams(temperature=0, max_tokens=MOST_TOKENS)
    asked = [chat.messages[:-1] for chat in chats]
    assert said == [output.text for output in llm.chat(asked, params)]


def test_the_default_rate_of_adapters_rises_as_models_get_thinner(config: TrainConfig) -> None:
    assert config.rate(4096) == 2e-4 and config.rate(512) == pytest.approx(2e-4 * 8**0.8)
    assert replace(config, full=True, rank=16).rate(512) == 2e-4 and replace(config, lr=0.5).rate(512) == 0.5


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.2, "about 1 s"), (99, "about 99 s"), (150, "about 2 min"), (7200, "about 2.0 h")]
)
def test_a_duration_is_told_as_people_say_it(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_shipped_models_are_trained_by_name(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--steps", "1", "--rank", "1", "--targets", "aligner", "--batch-tokens", "300"]
    arguments = ["finetune", shipped_models()[0], "--data", str(data), "--output", str(tmp_path / "out"), *options]
    assert main(arguments) == 0
    assert read_adapter(tmp_path / "out").counts() == {"aligner": 2}
    noted = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert noted == shipped_models()[0]
    assert "training 2 modules" in capsys.readouterr().out


@pytest.mark.parametrize("names", ["official", "hf"])
def test_the_command_says_what_it_trains_and_writes_a_folder_that_loads(
    names: str, config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--targets", ",".join(ALL), "--steps", "1", "--rank", "3", "--batch-tokens", "150", "--names", names]
    assert (
        main(["finetune", str(config.model), "--data", str(config.data), "--output", str(config.output), *options]) == 0
    )
    out = capsys.readouterr().out
    assert "2 chats" in out and "experts 120" in out and "tower" in out and "loss" in out
    counts = read_adapter(config.output).counts()
    assert set(counts) == set(ALL) and counts["experts"] == 5 * 8 * 3
    assert (config.output / "training" / "loss.png").exists()


def test_the_command_ends_with_130_when_it_was_interrupted(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["finetune", str(config.model), "--data", str(config.data), "--output", str(config.output)]
    arguments += ["--steps", "3", "--minutes", "0", "--batch-tokens", "150"]
    assert main(arguments) == 130
    assert "--resume goes on from step 1" in capsys.readouterr().out


def test_a_run_that_is_done_has_nothing_left_when_it_is_resumed(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["finetune", str(config.model), "--data", str(config.data), "--output", str(config.output)]
    arguments += ["--steps", "1", "--batch-tokens", "150"]
    assert main(arguments) == 0
    before = tensors(config.output)
    assert "loss" in capsys.readouterr().out
    assert main([*arguments, "--resume"]) == 0
    assert "nothing was left to learn in step 1 of 1" in capsys.readouterr().out
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(config.output).items())


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"targets": ("indexer",)}, AdapterError, "no gradient"),
        ({"targets": ("router",)}, AdapterError, "not a group"),
        ({"targets": ()}, AdapterError, "no targets"),
        ({"rank": 513}, AdapterError, "rank 513 is outside 1 to 512"),
        ({"batch_tokens": 50}, PromptError, "1 of 2 lines cannot be used"),
        ({"data": Path("nothing.jsonl")}, PromptError, "cannot be read"),
    ],
)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(
    changes: dict[str, Any], error: type[Exception], told: str, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("spyglass.train.finetune.load_model", never)
    with pytest.raises(error, match=told):
        finetune(replace(config, **changes), progress=False)


def test_a_target_that_could_learn_nothing_is_refused(
    config: TrainConfig, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without images an adapter of the tower stays what it is, which nobody asks for."""
    monkeypatch.setattr("spyglass.train.finetune.load_model", None)
    (tmp_path / "text.jsonl").write_text(data.read_text().splitlines()[1])
    blind = replace(config, data=tmp_path / "text.jsonl", targets=("attention", "tower"))
    with pytest.raises(ConfigError, match="shows no image, so tower would learn nothing"):
        finetune(blind, progress=False)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("result", ["adapter_config.json", "config.json"])
def test_a_result_without_the_state_of_its_run_is_never_overwritten(
    result: str, resume: bool, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can go on from it, whoever asks to; a run from the beginning would take its place."""
    monkeypatch.setattr("spyglass.train.finetune.load_model", None)
    config.output.mkdir()
    (config.output / result).write_text("{}")
    with pytest.raises(ConfigError, match="no state of training to go on from"):
        finetune(replace(config, resume=resume), progress=False)
    assert [path.name for path in config.output.iterdir()] == [result]


def test_a_folder_that_cannot_be_made_is_told_before_the_model_is_loaded(
    config: TrainConfig, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spyglass.train.finetune.load_model", None)
    with pytest.raises(ConfigError, match=r"chats\.jsonl.out.training cannot be written: .*--output"):
        finetune(replace(config, output=data / "out"), progress=False)


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of folders there")
def test_two_runs_never_share_a_folder(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would remove the states of the other."""
    monkeypatch.setattr("spyglass.train.finetune.load_model", None)
    (config.output / "training").mkdir(parents=True)
    with held_alone(config.output / "training"), pytest.raises(ConfigError, match="another process trains in"):
        finetune(config, progress=False)
    with held_alone(config.output / "training"):
        pass  # it is free again


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"steps": 0}, "steps is 0"),
        ({"epochs": 3}, r"steps \(2\) and epochs \(3\) both say how long"),
        ({"schedule": "square"}, "constant or linear or cosine"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"minutes": -1.0}, "minutes is -1.0"),
        ({"minutes": float("nan")}, "minutes is nan"),
        ({"lr": float("inf")}, "lr is inf"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"lr": 1e300}, "lr is 1e[+]300"),
        ({"weight_decay": 1e300}, "weight_decay is 1e[+]300"),
        ({"warmup": -1}, "warmup is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"save_every": 0}, "save_every is 0"),
        ({"device": "cuda:0x"}, "device is 'cuda:0x'"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"full": True, "dropout": 0.1}, "makes no adapter, so rank, dropout would do nothing"),
    ],
)
def test_an_option_that_means_nothing_is_refused_by_name(
    changes: dict[str, Any], told: str, config: TrainConfig
) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(config, **changes)
