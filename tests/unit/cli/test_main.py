"""The `spyglass` command's frame: verbs, exit codes, one clear line for what a person got wrong."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spyglass.cli import main as frame
from spyglass.cli.options import add_engine_options, engine_config
from spyglass.config import EngineConfig
from spyglass.errors import ConfigError, SpyglassError


def verb(run: Any) -> SimpleNamespace:
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--times", type=int, default=1)

    return SimpleNamespace(HELP="a verb", add_arguments=add_arguments, run=run)


def use(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    monkeypatch.setattr(frame, "load_verb", lambda name: verb(run))


def raising(error: BaseException) -> Any:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in frame.VERBS)


def test_no_verb_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main([]) == 2
    assert "usage: spyglass" in capsys.readouterr().out


def test_an_unknown_verb_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["fly"]) == 2
    assert capsys.readouterr().err == (f"spyglass: error: unknown verb 'fly'; the verbs are {', '.join(frame.VERBS)}\n")


@pytest.mark.parametrize("error", [SpyglassError("broken"), ConfigError("broken")])
def test_our_errors_are_one_line_and_exit_two(
    error: SpyglassError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, raising(error))
    assert frame.main(["run"]) == 2
    assert capsys.readouterr().err == "spyglass: error: broken\n"


def test_our_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, raising(AssertionError("a bug")))
    with pytest.raises(AssertionError, match="a bug"):
        frame.main(["run"])


def test_a_key_press_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, raising(KeyboardInterrupt()))
    assert frame.main(["run"]) == 130
    assert capsys.readouterr().err == "\n", "the prompt of the shell starts a line"


def test_a_verb_decides_the_exit_code_and_sees_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lambda args: args.times)
    assert frame.main(["check", "--times", "3"]) == 3


def text_options(name: str) -> list[str]:
    """Options of a verb that take a text or a path."""
    return [
        next((o for o in action.option_strings if o.startswith("--")), action.option_strings[0])
        for action in frame.build_parser(name, frame.load_verb(name))._actions
        if action.option_strings and action.nargs != 0 and not action.choices and action.type in (None, str, Path)
    ]


@pytest.mark.parametrize("name", [name for name in frame.VERBS if name not in ("bench", "list", "completion")])
def test_an_empty_text_is_refused_and_never_read_as_the_folder_here_or_as_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for option in text_options(name):
        for words in ([option, ""], [f"{option}="] if option.startswith("--") else [option, ""]):
            assert frame.main([name, "x", *words]) == 2
            assert f"error: {option} is empty; --help says of it: " in capsys.readouterr().err
    for words in ([""], ["--", ""]):
        assert frame.main([name, *words]) == 2
        assert "error: the argument " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_options_that_name_models_adapters_and_files_take_texts() -> None:
    """What the rule above goes through."""
    assert {"--model", "--lora", "--image", "--batch", "--output"} <= set(text_options("run"))
    assert {"--lora", "--adapter-root", "--model-name", "--api-key"} <= set(text_options("serve"))
    assert {"--lora", "--sheet"} <= set(text_options("eval"))
    assert {"--data", "--output"} <= set(text_options("finetune")) and "--lora" in text_options("merge")


def test_an_empty_number_choice_or_benchmark_option_is_refused_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run", "--seed", ""], ["run", "--thinking="]):
        with pytest.raises(SystemExit):
            frame.main([*words, "hi"])
        assert f"argument {words[1].rstrip('=')}" in capsys.readouterr().err
    assert frame.main(["bench", "load", ""]) == 2
    assert "an argument is empty" in capsys.readouterr().err


def test_options_may_not_be_abbreviated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, lambda args: 0)
    with pytest.raises(SystemExit) as caught:
        frame.main(["check", "--time", "3"])
    assert caught.value.code == 2
    assert "--time" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["run"], ["run", "--help"], ["--help"]])
def test_a_reader_that_goes_away_is_no_error(words: list[str]) -> None:
    code = (
        "import sys, time; from types import SimpleNamespace as N; from spyglass.cli import main as m\n"
        "def run(args):\n    for _ in range(200000): print('line')\n    return 0\n"
        "m.load_verb = lambda name: N(HELP='', add_arguments=lambda p: None, run=run)\n"
        "time.sleep(0.3)\n"  # by then the reader is gone, so that even a short text meets a broken pipe
        f"sys.exit(m.main({words!r}))"
    )
    done = subprocess.run(
        ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | true', sys.executable, code], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def shell(line: str, body: str) -> subprocess.CompletedProcess[str]:
    """The outcome of a verb with this body, run in a shell whose command line ends in `line`."""
    code = (
        "import sys; from types import SimpleNamespace as N; from spyglass.cli import main as m\n"
        f"def run(args):\n    {body}\n    return 0\n"
        "m.load_verb = lambda name: N(HELP='', add_arguments=lambda p: None, run=run)\n"
        "sys.exit(m.main(['run']))"
    )
    return subprocess.run(["bash", "-c", f'"$0" -c "$1" {line}', sys.executable, code], capture_output=True, text=True)


@pytest.mark.parametrize("line", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_stream_that_the_shell_closed_is_an_empty_one(line: str) -> None:
    body = "print('out', flush=True); print('err', file=sys.stderr); assert sys.stdin.read() == ''"
    done = shell(line if "<&-" in line else f"{line} </dev/null", body)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stdout == ("" if ">&-" in line.replace("2>&-", "") else "out\n")


@pytest.mark.parametrize("body", ["print('x', flush=True)", "print('x')", "print('x' * 10**6)"])
def test_a_full_disk_is_one_line(body: str) -> None:
    done = shell("> /dev/full", body)
    assert done.returncode == 2
    assert done.stderr == "spyglass: error: the output cannot be written: No space left on device\n"


def test_what_a_terminal_cannot_show_is_an_escape_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert shell("", r"print('caf\u00e9')").stdout == "caf\\xe9\n"
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8")
    assert shell("", r"print('caf\u00e9 \ud800')").stdout == "café \\ud800\n"


def parse_engine(*words: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return engine_config(parser.parse_args(words))


def test_engine_options_are_the_fields_of_the_engine_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRAMMAR_SECONDS", "NUMBERS"):  # set for all tests
        monkeypatch.delenv(f"SPYGLASS_{name}")
    assert parse_engine() == EngineConfig()
    assert parse_engine(
        "--device", "cpu", "--numerics", "plain", "--images", "0", "--expand-weights", "--threads", "1"
    ) == EngineConfig(device="cpu", numerics="plain", images=0, expand_weights=True, threads=1)


def test_an_option_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPYGLASS_IMAGES", "3")
    assert parse_engine().images == 3
    assert parse_engine("--images", "5").images == 5


def test_a_file_that_cannot_be_used_is_one_line_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "no folder" / "file"
    use(monkeypatch, lambda args: len(nowhere.read_text()))
    assert frame.main(["run"]) == 2
    assert capsys.readouterr().err == f"spyglass: error: {nowhere} cannot be used: No such file or directory\n"


def test_a_fault_of_the_system_that_names_no_file_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, raising(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        frame.main(["run"])


@pytest.mark.skipif(sys.platform != "linux", reason="another OpenMP library")
def test_threads_of_the_command_that_wait_soon_sleep_unless_the_user_has_said_when() -> None:
    code = "import sys, spyglass.cli.main as m\ntry: m.main(['--version'])\nexcept SystemExit: pass\nimport torch"
    for given, found in (({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")):
        environment = {**{k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}, **given}
        asked = [sys.executable, "-c", code]
        done = subprocess.run(
            asked, env={**environment, "OMP_DISPLAY_ENV": "VERBOSE"}, capture_output=True, text=True, check=True
        )
        assert f"GOMP_SPINCOUNT = '{found}'" in done.stderr


def test_python_runs_the_package_as_the_command() -> None:
    asked = [sys.executable, "-m", "spyglass", "nonsense"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "nonsense" in done.stderr and "Traceback" not in done.stderr
