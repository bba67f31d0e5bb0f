"""`spyglass run`: the answer on standard output, everything else on standard error."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spyglass.checkpoint.random import new_checkpoint
from spyglass.cli.main import main
from spyglass.engine.llm import LLM
from spyglass.engine.request import SamplingParams
from spyglass.lora.write import write_adapter
from tests.adapter_parts import random_adapter, shapes_of

pytestmark = pytest.mark.slow  # most of these load a model from disk
MODEL = ["--device", "cpu", "--dtype", "float32", "--numerics", "plain"]


@pytest.fixture(scope="module")
def folder(tiny_folder: Path) -> Path:
    return tiny_folder


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "photo.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, device="cpu", dtype="float32", numerics="plain")


def expected(llm: LLM, photo: Path | None, text: str) -> str:
    image = [] if photo is None else [{"type": "image_url", "image_url": {"url": photo}}]
    messages = [{"role": "user", "content": [*image, {"type": "text", "text": text}]}]
    return llm.chat(messages, SamplingParams(max_tokens=5, seed=7)).text


@pytest.mark.parametrize("how", [[], ["--no-stream"]])
def test_the_answer_goes_to_stdout_and_the_numbers_to_stderr(
    how: list[str], folder: Path, photo: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = ["--max-tokens", "5", "--seed", "7"]
    assert main(["run", "--model", str(folder), "--image", str(photo), *MODEL, *sampling, *how, "What is this?"]) == 0
    out, err = capsys.readouterr()
    assert out == expected(llm, photo, "What is this?") + "\n"
    numbers = re.search(r"prompt (\d+) tokens \((\d+) of images\), first token after [\d.]+ s, answer 5 tokens", err)
    assert numbers is not None and int(numbers[1]) - int(numbers[2]) in range(5, 30)
    assert "tokens/s" in err


def test_an_adapter_is_used_and_its_modules_are_told(
    folder: Path, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = random_adapter(shapes_of(llm.loaded.model), ["attention", "aligner"], rank=2, size=1.0)
    write_adapter(tmp_path / "mine", adapter)
    llm.add_adapter("mine", tmp_path / "mine")
    chat = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    answer = llm.chat(chat, SamplingParams(max_tokens=5, seed=7), adapter="mine").text
    asked = ["run", "--model", str(folder), *MODEL, "--max-tokens", "5", "--seed", "7", "Hello"]
    assert main([*asked, "--lora", str(tmp_path / "mine")]) == 0
    out, err = capsys.readouterr()
    assert out == answer + "\n" != expected(llm, None, "Hello") + "\n"
    assert re.search(r"adapter .*mine: \d+ modules: text: attention \d+; vision: aligner 2\n", err)
    llm.remove_adapter("mine")
    assert main([*asked, "--lora", str(tmp_path)]) == 2
    assert "is no adapter" in capsys.readouterr().err


def test_lines_of_a_batch_choose_among_the_adapters_by_model(
    folder: Path, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, name in enumerate(("a", "b")):
        write_adapter(tmp_path / name, random_adapter(shapes_of(llm.loaded.model), ["attention"], seed=seed, size=1.0))
    body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {**body, "model": name}}
        for name in ("tiny", "a", "b", "c")
    ]
    batch = tmp_path / "in.jsonl"
    batch.write_text("".join(json.dumps(line) + "\n" for line in lines))
    adapters = [word for name in ("a", "b") for word in ("--lora", f"{name}={tmp_path / name}")]
    assert main(["run", "--model", str(folder), *MODEL, "--batch", str(batch), *adapters]) == 1
    err = capsys.readouterr().err
    assert err.count(" modules: text: attention") == 2 and "3 answered, 1 refused" in err
    answers = map(json.loads, (tmp_path / "in.answers.jsonl").read_text().splitlines())
    found = {answer["custom_id"]: answer["response"] for answer in answers}
    assert "served are tiny, a, b" in found.pop("c")["body"]["error"]["message"]
    assert len({response["body"]["choices"][0]["text"] for response in found.values()}) == 3


def test_an_adapter_that_was_made_for_another_model_is_remarked_on(
    folder: Path, llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = random_adapter(shapes_of(llm.loaded.model), ["attention"], rank=2, size=1.0)
    for base, told in (("somebody/Other-Model", True), (f"/elsewhere/{folder.name.upper()}/", False), (None, False)):
        write_adapter(tmp_path / "mine", adapter, base_model=base)
        asked = ["run", "--model", str(folder), *MODEL, "--max-tokens", "1", "--lora", str(tmp_path / "mine"), "Hello"]
        assert main(asked) == 0
        err = capsys.readouterr().err
        assert ("warning: the adapter mine was made for 'Other-Model', this is 'tiny'" in err) == told
        assert ("warning" in err) == told


def test_a_question_may_come_from_standard_input(
    folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    assert main(["run", "--model", str(folder), *MODEL, "--max-tokens", "5", "--seed", "7"]) == 0
    assert capsys.readouterr().out == expected(llm, None, "Hello") + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["run", "--model", str(folder), *MODEL]) == 2


def test_random_weights_are_said_to_be_noise(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that `new-checkpoint` wrote says so; one without the note is taken for trained."""
    trained = tmp_path / "trained"
    trained.mkdir()
    for file in folder.iterdir():
        if file.name != "config.json":
            (trained / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    del config["spyglass_random_weights"]
    (trained / "config.json").write_text(json.dumps(config))
    for path, random in ((folder, True), (trained, False)):
        assert main(["run", "--model", str(path), *MODEL, "--images", "0", "--max-tokens", "1", "Hello"]) == 0
        assert ("noise" in capsys.readouterr().err) == random


def test_a_question_that_is_the_name_of_a_file_is_answered_with_a_hint(
    folder: Path, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for question, hinted in ((str(photo), True), ("no such file.png " * 99, False)):
        assert main(["run", "--model", str(folder), *MODEL, "--images", "0", "--max-tokens", "1", question]) == 0
        assert (f"--image {question}" in capsys.readouterr().err) == hinted


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--temperature", "-1", "hi"], "temperature"),
        (["--image", "nowhere.jpg", "hi"], "nowhere.jpg"),
        (["--images", "0", "--image", "PHOTO", "hi"], "images"),
        (["--thinking", "off", "--effort", "max", "hi"], "effort"),
        (["--lora", "a", "--lora", "b", "hi"], "--lora is given 2 times"),
        (["--lora", "a", "--batch", "PHOTO"], "expected NAME=DIR"),
    ],
)
def test_a_persons_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], told: str, folder: Path, photo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(photo) if argument == "PHOTO" else argument for argument in arguments]
    assert main(["run", "--model", str(folder), *MODEL, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    assert err.splitlines()[-1].startswith("spyglass: error: ") and told in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--image", "nowhere.jpg"], "nowhere.jpg cannot be read: No such file or directory"),
        (["--image", "CONFIG"], "config.json is none of JPEG"),
        (["--images", "1", "--image", "PHOTO", "--image", "PHOTO"], "given 2 times with --images 1"),
        (["--effort", "low"], "needs thinking"),
        (["--threads", "0"], "threads"),
    ],
)
def test_what_can_be_seen_to_fail_is_told_before_anything_is_loaded(
    arguments: list[str], told: str, folder: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has no weights, which would be the next thing to complain about."""
    config = Path(shutil.copy(folder / "config.json", tmp_path))
    names = {"PHOTO": str(photo), "CONFIG": str(config)}
    assert main(["run", "--model", str(tmp_path), *(names.get(word, word) for word in arguments), "hi"]) == 2
    assert told in capsys.readouterr().err


def test_a_picture_for_a_text_checkpoint_is_refused_before_anything_is_loaded(
    folder: Path, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_n_layers": 0}))
    assert main(["run", "--model", str(tmp_path), "--image", str(photo), "hi"]) == 2
    assert "takes no images" in capsys.readouterr().err


def test_weights_that_are_holes_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new_checkpoint(tmp_path / "holes", "tiny", headers_only=True)
    assert main(["run", "--model", str(tmp_path / "holes"), *MODEL, "--images", "0", "--max-tokens", "1", "hi"]) == 2
    assert "is zeros from about byte" in capsys.readouterr().err


def test_where_no_model_is_shipped_or_named_the_option_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spyglass.cli.options.default_model", lambda: "demo-model")
    assert main(["run", "hi"]) == 2
    assert "--model" in capsys.readouterr().err


def test_a_chat_remembers_what_was_said(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["Hello", "", "And now?", "/exit"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr("spyglass.cli.chat_session.HISTORY", os.devnull + "/history")
    assert main(["run", "--model", str(folder), *MODEL, "--max-tokens", "4", "--seed", "3"]) == 0
    told = re.findall(r"prompt (\d+) tokens", capsys.readouterr().err)
    assert len(told) == 2 and int(told[1]) > int(told[0]) + 4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["spyglass-tiny-v41"],
            "'spyglass-tiny-v41' names a model, and stands where the question is; say `spyglass chat",
        ),
        (["org/name@v1"], 'or `spyglass run org/name@v1 "your question"`'),
        (["What", "is", "this?"], 'quote the question: "What is this?"'),
        (["--model", "spyglass-tiny-v41", "spyglass-tiny-v4", "hi"], "one argument too many"),
    ],
)
def test_a_model_in_the_place_of_the_question_is_refused_with_the_right_form(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_model_may_stand_before_the_question_wherever_options_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([str(folder), "--max-tokens", "1", "hi"], ["hi", "--max-tokens", "1", "--model", str(folder)]):
        assert main(["run", *words, "--temperature", "0"]) == 0
        assert "answer 1 tokens" in capsys.readouterr().err


def test_quiet_prints_the_answer_alone(folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", str(folder), *MODEL, "--max-tokens", "5", "--seed", "7", "-q", "Hello"]) == 0
    assert capsys.readouterr() == (expected(llm, None, "Hello") + "\n", "")
