"""Options under the names people know, in files, and completed by shells."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from spyglass.cli.main import OPTIONS_ELSEWHERE, VERBS, VERBS_ELSEWHERE, build_parser, load_verb, main, parse
from spyglass.cli.options import ALIASES, engine_config, server_config
from spyglass.config import EngineConfig
from spyglass.errors import ConfigError

CLI = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")


def read(verb: str, *words: str) -> object:
    return parse(build_parser(verb, load_verb(verb)), words)


def test_an_alias_means_what_the_option_means() -> None:
    engine = ["--max-model-len", "4096", "--max-num-seqs", "3", "--max-num-batched-tokens", "512"]
    args = read("serve", "-m", "x", *engine, "--served-model-name", "a", "--served-model-name", "b", "-tp", "1")
    engine_options = engine_config(args)  # type: ignore[arg-type]
    assert (engine_options.max_length, engine_options.max_sequences, engine_options.max_step_tokens) == (4096, 3, 512)
    assert server_config(args).model_name == ("a", "b") and args.model_option == "x"  # type: ignore[arg-type, attr-defined]
    args = read("serve", "--lora", "a=1", "--lora-modules", "b=2", "c=3", "--gpu-memory-utilization", "0.5")
    assert args.lora == ["a=1", "b=2", "c=3"]  # type: ignore[attr-defined]
    assert engine_config(args).gpu_memory_utilization == 0.5  # type: ignore[arg-type]


def test_names_of_other_programs_mean_the_option_of_a_question() -> None:
    args = read("run", "-m", "x", "-p", "why?", "-n", "5", "--temp", "0.5", "--ctx-size", "512", "-t", "2")
    assert (args.prompt, args.max_tokens, args.temperature) == ("why?", 5, 0.5)  # type: ignore[attr-defined]
    options = engine_config(args)  # type: ignore[arg-type]
    assert (options.max_length, options.threads) == (512, 2)


def test_every_alias_stands_in_the_table_beside_the_option_that_takes_it() -> None:
    found = re.findall(r"^\| `(--[\w-]+)[^|]*\|([^|]*)\|", CLI, re.MULTILINE)
    rows = {option: re.findall(r"`(-[\w-]+)", names) for option, names in found}
    for field, names in ALIASES.items():
        assert rows["--" + field.replace("_", "-")] == list(names)
    every = {o for verb in VERBS for a in build_parser(verb, load_verb(verb))._actions for o in a.option_strings}
    assert {*rows, *(name for names in rows.values() for name in names)} - {"-V", "--version"} <= every


def test_what_other_programs_call_a_verb_or_option_is_told_and_is_there() -> None:
    assert set(VERBS_ELSEWHERE.values()) <= set(VERBS) and not set(VERBS_ELSEWHERE) & set(VERBS)
    every = {o for verb in VERBS for a in build_parser(verb, load_verb(verb))._actions for o in a.option_strings}
    assert set(OPTIONS_ELSEWHERE.values()) <= every and not set(OPTIONS_ELSEWHERE) & every


def test_numbers_of_processes_that_mean_nothing_are_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--tensor-parallel-size", "0", "hi"]) == 2
    assert "tensor_parallel_size is 0, expected" in capsys.readouterr().err
    assert main(["run", "-m", "spyglass-tiny-v41", "-tp", "3", "--device", "cpu", "hi"]) == 2
    assert "tensor_parallel_size is 3, but this model divides into 1, 2 processes" in capsys.readouterr().err


@pytest.mark.parametrize("share", [0, 1.5, -1, True])
def test_a_share_of_memory_is_above_nothing_and_at_most_all(share: float) -> None:
    with pytest.raises(ConfigError, match="expected a number above 0, at most 1"):
        EngineConfig(gpu_memory_utilization=share)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_of_options_is_read_and_the_command_line_wins(tmp_path: Path) -> None:
    path = written(tmp_path, "max-model-len: 300\nseed: 7\nimage: [a.jpg, b.jpg]\nno-stream: true\nmodel: there\n")
    args = vars(read("run", "--config", path, "--seed", "8", "hi"))  # type: ignore[call-overload]
    assert (args["max_length"], args["seed"], args["no_stream"], args["model"]) == (300, 8, True, "there")
    assert args["image"] == [Path("a.jpg"), Path("b.jpg")]
    args = vars(read("run", f"--config={path}", "--image", "c.jpg", "--max-length", "5"))  # type: ignore[call-overload]
    assert args["image"] == [Path("c.jpg")] and args["max_length"] == 5
    assert vars(read("serve", "here", "--config", written(tmp_path, "model: there")))["model"] == "here"  # type: ignore[call-overload]
    path = written(tmp_path, "model: m\ndata: chats.jsonl\noutput: out\ncheckpointing: false\n")
    args = vars(read("finetune", "--config", path))  # type: ignore[call-overload]
    assert (args["model"], args["data"], args["checkpointing"]) == ("m", Path("chats.jsonl"), False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max-lenth: 3", "'max-lenth' is no option of spyglass run; known are model, "),
        ("thinking: maybe", "thinking: invalid choice: 'maybe'"),
        ("seed: [1, 2]", r"seed is \[1, 2\], expected one value"),
        ("seed: x", "seed: invalid integer value: 'x'"),
        ("no-stream: 3", "no-stream is 3, expected true or false"),
        ("- a", "must hold options by name"),
        ("a: [", "is no YAML"),
        ("config: x", "'config' is no option"),
    ],
)
def test_what_a_file_of_options_cannot_say_is_refused_by_name(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        read("run", "--config", written(tmp_path, text))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read("run", "--config", str(tmp_path / "none.yaml"))


def test_a_name_that_resembles_a_known_one_is_answered_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sreve"]) == 2
    assert capsys.readouterr().err.endswith("; did you mean serve?\n")
    with pytest.raises(SystemExit):
        main(["run", "--temprature", "0"])
    assert "unrecognized arguments: --temprature; did you mean --temperature?\n" in capsys.readouterr().err
    assert main(["-V"]) == 0 and capsys.readouterr().out.startswith("spyglass ")


def completed(script: str, line: str, folder: Path) -> set[str]:
    """What bash offers for the last word of a command line."""
    words = line.split(" ")
    code = f"{script}\nCOMP_WORDS=({' '.join(repr(word) for word in words)})\nCOMP_CWORD={len(words) - 1}\n_spyglass\n"
    code += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    )
    return set(done.stdout.split())


def test_bash_completes_verbs_options_choices_and_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "spyglass se", tmp_path) == {"serve"}
    assert completed(script, "spyglass serve --max-m", tmp_path) == {"--max-model-len"}
    assert completed(script, "spyglass run --thinking ", tmp_path) >= {"on", "off"}
    assert completed(script, "spyglass show spyglass-tiny-v41", tmp_path) == {"spyglass-tiny-v41"}
    assert completed(script, "spyglass eval --model spy", tmp_path) == {"spyglass-tiny-v4", "spyglass-tiny-v41"}
    assert completed(script, "spyglass bench lo", tmp_path) == {"load"}


def test_the_other_shells_are_told_every_verb_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    scripts = []
    for shell in ("zsh", "fish"):
        assert main(["completion", shell]) == 0
        scripts.append(capsys.readouterr().out)
    assert "bashcompinit" in scripts[0]
    for verb in VERBS:
        for action in build_parser(verb, load_verb(verb))._actions:
            for option in action.option_strings:
                assert option in scripts[0]
                assert f"-l {option[2:]} " in scripts[1] if option.startswith("--") else f" {option[1:]} " in scripts[1]
