"""Several processes train what one does: the same loss curve, also in a run that one process began."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from spyglass.cli.main import main
from spyglass.lora.peft import read_adapter
from spyglass.train.log import read_log
from tests.tolerance import GRADIENT_OF_MAX, LOSS_LAW, TRAINED_APART, assert_close

pytestmark = pytest.mark.slow
ADAPTER = ["--targets", "compressor,experts,aligner", "--rank", "2", "--dropout", "0.1"]
KINDS = {"adapter": ADAPTER, "tower": ["--targets", "tower,aligner", "--rank", "2"], "full": ["--full"]}
OPTIONS = [
    *("--steps", "3", "--accumulate", "2", "--batch-tokens", "150", "--warmup", "0", "--lr", "0.01"),
    *("--dtype", "float32", "--numerics", "plain", "--device", "cpu"),
]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats of which two micro-batches see an image and two do not, and none fills the slowest pool alone."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("data")
    Image.new("RGB", (56, 56), "red").save(folder / "red.png")
    shown = {"type": "image_url", "image_url": {"url": "red.png"}}
    questions = [[shown, {"type": "text", "text": "Which colour?"}], "Name a colour.", "Name another one.", "Say it."]
    lines = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": f"Red {number}."}]}
        for number, question in enumerate(questions)
    ]
    path = folder / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.mark.parametrize("kind", ["adapter", "tower", "full"])
def test_two_processes_go_on_with_a_run_of_one_as_if_nothing_had_changed(
    kind: str, tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    """FSDP2 over gloo, started by torchrun; packed weights and adapters of every layer are spread over both.

    A model that is trained whole is held by each. A tower alone is trained by the micro-batches with images.
    """
    full = kind == "full"

    def arguments(name: str, *more: str) -> list[str]:
        place = ["--data", str(data), "--output", str(tmp_path / name)]
        return ["finetune", str(tiny_folder), *place, *OPTIONS, *KINDS[kind], *more]

    assert main(arguments("one")) == 0
    assert main(arguments("two", "--minutes", "0")) == 130
    command = [*TORCHRUN, "-m", "spyglass.cli.main", *arguments("two", "--resume")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("4 chats") == 1, "only one process talks"
    curves = {name: [(row.loss, row.norm) for row in read_log(tmp_path / name / "training")] for name in ("one", "two")}
    assert len(curves["one"]) == 3
    assert_close(curves["two"], curves["one"], TRAINED_APART if full else LOSS_LAW)
    if full:
        assert_same_checkpoints(tmp_path / "one", tmp_path / "two")
        return
    one, two = (read_adapter(tmp_path / name).modules for name in ("one", "two"))
    assert one.keys() == two.keys()
    changed = [name for name, pair in one.items() if pair.b_OR.any()]
    assert any(name.startswith("aligner") for name in changed)
    assert any("experts" in name for name in changed) == (kind == "adapter")
    for name, pair in one.items():
        assert_close(two[name].b_OR, pair.b_OR, TRAINED_APART, name)


def assert_same_checkpoints(one: Path, two: Path) -> None:
    """Biases that balance experts have moved alike, by the choices of both processes; weights are stored rounded."""
    slots = [
        {path.name: safetensors.torch.load_file(path) for path in folder.glob("*.safetensors")} for folder in (one, two)
    ]
    assert slots[0].keys() == slots[1].keys() and slots[0]
    tensors = [{name: tensor for file in side.values() for name, tensor in file.items()} for side in slots]
    biases = [name for name in tensors[0] if name.endswith((".ffn.gate.bias", ".ffn.gate.bias_vl"))]
    moved = torch.cat([torch.stack([side[name] for side in tensors]) for name in biases], dim=1)
    assert (moved[0] == moved[1]).float().mean() > 0.9
    norms = [name for name in tensors[0] if name.endswith("norm.weight")]
    for name in norms:
        assert_close(tensors[1][name].float(), tensors[0][name].float(), TRAINED_APART, name)


def test_processes_that_do_not_share_their_folder_do_not_resume(tmp_path: Path) -> None:
    """On a machine whose disk has no state a process would begin anew and wait for ever for those that go on."""
    module = ["-m", "tests.unit.train.run_in_processes", "v4", "cpu"]
    subprocess.run([sys.executable, *module, str(tmp_path / "0")], check=True, timeout=100)
    command = [*TORCHRUN, *module, str(tmp_path), "apart"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "1 of 2 processes do not find the run" in done.stderr and "(step 3)" in done.stderr


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("cpu", "v41"),
        pytest.param("cuda", "v4", marks=pytest.mark.gpu),
        pytest.param("cuda", "v41", marks=pytest.mark.gpu),
    ],
)
def test_two_processes_have_the_losses_of_one(device: str, name: str, tmp_path: Path) -> None:
    """FSDP2 over gloo on a host and over NCCL on two GPUs, without a tokenizer; V4.1 has layers that read others'."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    start = {"one": [sys.executable], "two": TORCHRUN}
    for folder, command in start.items():
        module = ["-m", "tests.unit.train.run_in_processes", name, device, str(tmp_path / folder)]
        done = subprocess.run([*command, *module], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (read_log(tmp_path / folder) for folder in start)
    assert len(one) == 3 and [row.tokens for row in one] == [row.tokens for row in two]
    assert_close([row.loss for row in two], [row.loss for row in one], LOSS_LAW)
    for row, other in zip(one, two, strict=True):
        assert other.norm == pytest.approx(row.norm, rel=GRADIENT_OF_MAX)
    assert abs(one[-1].loss - one[0].loss) > 1e-3, "something was learnt between"
