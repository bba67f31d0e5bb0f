"""The first hour with Spyglass, command by command: what a newcomer types, with the habits of other programs.

Other parts of the hour have tests of their own: what README and documents show runs and answers rightly
(`test_examples_run.py`, `test_examples_scripts.py`, `tests/server/test_documented.py`), the chat in a terminal
(`tests/unit/cli/test_chat.py`), the page (`tests/server/test_playground_page.py`), other people's clients
(`tests/server/test_clients.py`, `test_ollama.py`), containers and services (`test_deploy.py`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from spyglass.cli.main import VERBS, build_parser, load_verb, main

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "examples" / "shapes.jpg"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HUB_PAGE = "https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash-Vision-Exp"

# What is typed, and what the one line of answer says.
REFUSED = {
    "srve": "did you mean serve?",
    "generate hi": "did you mean run?",
    "download org/name": "did you mean pull?",
    "train": "did you mean finetune?",
    "run --temprature 0 hi": "did you mean --temperature?",
    "run --max_tokens 4 hi": "did you mean --max-tokens?",
    "run --adapter-path x hi": "did you mean --lora?",
    "finetune --learning-rate 1 --data a --output b m": "did you mean --lr?",
    "run": "there is no question",
    "run llama3 hi": "llama3: not a folder; give the folder",
    "run spyglas-tiny-v4 hi": "did you mean spyglass-tiny-v4?",
    "run spyglass-tiny-v41": "names a model",
    "run shapes.jpg 'What is this?'": "spyglass run --image shapes.jpg \"What is this?\"",
    "run 'What is this?' shapes.jpg": "spyglass run --image shapes.jpg \"What is this?\"",
    "run --image nowhere.jpg hi": "nowhere.jpg cannot be read",
    "run a b c": "quote the question",
    f"run {HUB_PAGE} hi": "spyglass pull deepseek-ai/DeepSeek-V4-Flash-Vision-Exp",
    "run https://huggingface.co/": "a model is named ORG/NAME[@revision]",
    "run hf.co/ hi": "a model is named ORG/NAME[@revision]",
    "chat https://huggingface.co/deepseek-ai": "a model is named ORG/NAME[@revision]",
    "pull hf.co/deepseek-ai/": "a model is named ORG/NAME[@revision]",
    "run --max-model-len 20000 hi": "max_length (--max-model-len) is 20,000, and the context length of this model is",
    "serve -c 16385": "is 16,385, and the context length of this model is 16,384",
    "eval --max-length 99999 --num 1": "is 99,999, and the context length of this model is 16,384",
    "run --max-num-seqs 5000 hi": "max_sequences is 5000, expected an integer from 1 to 4,096",
    "run --max-num-batched-tokens 2000000 hi": "max_step_tokens is 2000000, expected an integer from 1 to 1,048,576",
    "run --max-num-batched-tokens 8 hi": "raise it to at least",
    "run --gpu-memory-utilization 1.5 hi": "gpu_memory_utilization is 1.5, expected a number above 0, at most 1",
    "run -t 5000 hi": "threads is 5000, expected an integer from 1 to 1,024",
    "run -tp 65 hi": "tensor_parallel_size is 65, expected an integer from 1 to 64",
    "run --batch nowhere.jsonl": "is no file",
    "chat nowhere": "nowhere: not a folder",
    "chat --image nowhere.jpg": "nowhere.jpg cannot be read",
    "serve nowhere": "nowhere: not a folder",
    "serve --port 99999": "expected an integer from 0 to 65,535",
    "serve --lora x": "expected NAME=DIR",
    "serve --lora x=nowhere": "there is no folder nowhere",
    "eval nowhere": "nowhere: not a folder",
    "eval --num 0": "at least 1",
    "show": "no model is named",
    "show nowhere": "nowhere: not a folder",
    "check nowhere": "nowhere: not a folder",
    "merge --lora x --output y": "no model is named",
    "merge nowhere --lora x --output y": "nowhere: not a folder",
    "finetune nowhere --data x --output y": "nowhere: not a folder",
    "pull spyglass-tiny-v4": "there is nothing to download",
    "rm spyglass-tiny-v4": "are not deleted",
    "inspect nowhere.jpg": "nowhere.jpg cannot be read",
    "run -ngl 99 hi": "unrecognized arguments: -ngl",
    "run -np 4 hi": "did you mean --max-sequences?",
    "run nowhere 'is there a square in photo.jpg'": "nowhere: not a folder",
    "run spyglass-tiny-v4 shapes.png": "`spyglass run --image shapes.png spyglass-tiny-v4 \"your question\"`",
    "eval --kinds nothing --control grey": "there is no kind 'nothing' here; there are colour",
    "run --config nowhere.yaml hi": "nowhere.yaml cannot be read",
}  # fmt: skip
TYPED = """
import contextlib, io, json, shlex, sys
from spyglass.cli.main import main
told = {}
for line in json.load(sys.stdin):
    shown = io.StringIO()
    sys.stdin = io.StringIO()
    with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
        try:
            code = main(shlex.split(line))
        except SystemExit as ended:
            code = ended.code
    told[line] = [code, shown.getvalue(), "torch" in sys.modules]
json.dump(told, sys.stdout)
"""
# What people look for, and where: the README says what the thing is, the documents how it is used.
SEARCHED = (
    "vision-language model", "OpenAI-compatible", "structured output", "tool call", "KV cache", "continuous batching",
    "context length", "projector", "LoRA", "fine-tune", "quantized", "prefix caching", "multimodal", "FP8",
    "CUDA graph", "tensor parallel", "Docker", "Ollama", "Anthropic", "Hugging Face", "wheel", "PEFT",
    "playground", "streaming",
)  # fmt: skip


def in_folder(folder: Path, command: list[str], told: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **more}
    return subprocess.run(
        command, cwd=folder, input=told, env=environment, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, bool]]:
    """Exit code, message, and whether torch was loaded by then: all in one process, which any of them may spoil."""
    folder = tmp_path_factory.mktemp("desk")
    shutil.copy(SHAPES, folder)
    done = in_folder(folder, [sys.executable, "-c", TYPED], json.dumps(list(REFUSED)))
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, str, bool]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("typed", REFUSED)
def test_what_cannot_be_done_is_answered_in_words_that_help(
    typed: str, refused: dict[str, tuple[int, str, bool]]
) -> None:
    code, said, _ = refused[typed]
    faults = 1  # what `check` finds is its result
    assert code == (faults if typed.startswith("check") else 2) and REFUSED[typed] in said, said
    assert "Traceback" not in said


def test_no_refusal_waits_for_torch(refused: dict[str, tuple[int, str, bool]]) -> None:
    assert next((typed for typed, (_, _, loaded) in refused.items() if loaded), None) is None


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_what_it_does_and_takes(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for words in ([verb, "--help"], ["help", verb]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] and told[0].startswith(f"usage: spyglass {verb}")
    undocumented = [a.option_strings or a.dest for a in build_parser(verb, load_verb(verb))._actions if not a.help]
    assert not undocumented


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_names_is_one_that_is_taken(page: Path) -> None:
    """Those that are not run here too: what needs a network, a GPU or a model that is not there."""
    for line in re.findall(r"^ *(?:\S+=\S+ )*spyglass (\S.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        words = shlex.split(line.partition(" | ")[0], comments=True)
        if words[0] in VERBS and words[0] != "bench":
            parser = build_parser(words[0], load_verb(words[0]))
            parser.parse_intermixed_args(words[1:])


def test_the_words_that_people_search_for_are_there() -> None:
    text = " ".join(" ".join(page.read_text(encoding="utf-8") for page in PAGES).split()).lower()
    assert not [word for word in SEARCHED if word.lower() not in text]


@pytest.mark.slow
def test_a_wheel_has_all_that_it_needs_elsewhere(tmp_path: Path) -> None:
    """Built as `make wheel` builds it, from a copy of what is tracked, unpacked into an empty folder."""
    files = subprocess.run(["git", "ls-files", "spyglass"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in ["pyproject.toml", "README.md", "LICENSE", *files.stdout.split()]:
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "src" / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path), "./src"]
    done = in_folder(tmp_path, [*pip, *build])
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("spyglass-*.whl")
    home = tmp_path / "installed"
    done = in_folder(tmp_path, [*pip, "install", "--no-deps", "--no-index", "--target", str(home), str(wheel)])
    assert done.returncode == 0, done.stderr
    for source in files.stdout.split():
        assert (home / source).is_file(), f"{source} is not in the wheel"
    question = ["run", "--image", str(SHAPES), "--temperature", "0", "-q", "What shape is the red thing?"]
    done = in_folder(tmp_path, [sys.executable, "-m", "spyglass", *question], PYTHONPATH=str(home))
    assert done.stdout == "It is a triangle.\n", done.stderr
