"""`spyglass <verb> ...`: finds the verb's module, parses its options, turns our errors into one clear line.

A verb is a module `spyglass.cli.<verb with underscores>` with `HELP`, `add_arguments(parser)` and `run(args) -> int`.
Only the verb that was asked for is imported, so help is printed without loading torch.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn, Protocol

from spyglass import __version__
from spyglass.cli.config_file import add_config_option, read_config_file
from spyglass.errors import ConfigError, SpyglassError, did_you_mean

VERBS = {
    "run": "ask a model about images, or just talk to it; the answer streams to the terminal",
    "chat": "talk to a model in the terminal, with images, commands and history",
    "serve": "an OpenAI-compatible server, for Anthropic's and Ollama's clients too, with a page to try it",
    "eval": "ask a model fresh questions about simple images; accuracy kind by kind",
    "finetune": "train a LoRA adapter on chats with images, on the packed weights as they are",
    "merge": "write a checkpoint with a LoRA adapter merged into its weights",
    "inspect": "draw what the model sees of an image: size, patches, tokens, order, visibility",
    "check": "say from headers alone whether a checkpoint would load here, and what would run",
    "new-checkpoint": "write a seeded random checkpoint in the official layout",
    "pull": "download a model of the Hugging Face hub, or what is newer of it",
    "list": "show the models that are here: those that come along and those downloaded",
    "show": "say what a model is: size, layers, images, formats, adapters, licence",
    "rm": "delete a downloaded model",
    "completion": "print what makes a shell complete verbs, options and models: bash, zsh or fish",
    "bench": "measure one part beside its baseline: image, load, model, serve, and others",
}
VERBS_ELSEWHERE = {
    "ask": "run", "generate": "run", "infer": "run", "download": "pull", "ls": "list", "models": "list", "info": "show",
    "remove": "rm", "delete": "rm", "server": "serve", "start": "serve", "train": "finetune", "sft": "finetune",
    "lora": "finetune", "evaluate": "eval", "benchmark": "bench", "doctor": "check",
}  # fmt: skip
OPTIONS_ELSEWHERE = {  # what means the same; other names that are taken as they are stand in `options.ALIASES`
    "--adapter": "--lora", "--adapter-path": "--lora", "--lora-path": "--lora", "--alias": "--model-name",
    "--n-predict": "--max-tokens", "--predict": "--max-tokens", "--num-predict": "--max-tokens",
    "--parallel": "--max-sequences", "-np": "--max-sequences", "--system-prompt": "--system", "-sys": "--system",
    "--lora-r": "--rank", "-r": "--rank", "--lora-alpha": "--alpha", "--target-modules": "--targets",
    "--lora-target-modules": "--targets", "--dataset": "--data", "--output-dir": "--output",
    "--learning-rate": "--lr", "--num-train-epochs": "--epochs", "--max-steps": "--steps",
    "--gradient-accumulation-steps": "--accumulate", "--per-device-train-batch-size": "--batch-chats",
}  # fmt: skip
INTERRUPTED = 130  # what shells report for a process ended by SIGINT
USER_FAULT = 2
_SEVERAL_LETTERS = ("-ngl", "-np", "-cnv", "-cb", "-tb", "-ub", "-fa", "-hf", "-sm", "-ctk", "-ctv")  # of llama.cpp
_UNKNOWN_OPTION = re.compile(r"unrecognized arguments: (--?[A-Za-z][\w-]*)")
_OPTION_WITHOUT_VALUE = re.compile(r"(--?[A-Za-z][\w-]*)=")


class Verb(Protocol):
    """What a verb's module offers."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's options."""

    def run(self, args: argparse.Namespace) -> int:
        """Do the work; the result is the exit code."""


def overview() -> str:
    """The text of `spyglass --help`."""
    width = max(len(name) for name in VERBS)
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, text in VERBS.items())
    return (
        f"usage: spyglass <verb> [options]\n\n"
        f"Spyglass {__version__} runs, serves and fine-tunes the DeepSeek-V4 vision-language models.\n\n"
        f"verbs:\n{verbs}\n\n"
        f"`spyglass <verb> --help` lists a verb's options, `spyglass --version` says the version."
    )


def load_verb(name: str) -> Verb:
    """Import the module of one verb of `VERBS`."""
    module: object = import_module(f"spyglass.cli.{name.replace('-', '_')}")
    return module  # type: ignore[return-value]  # modules cannot be checked against a Protocol when named by a string


class Parser(argparse.ArgumentParser):
    """An argument parser that asks "did you mean" of an option it does not know."""

    def error(self, message: str) -> NoReturn:
        unknown = _UNKNOWN_OPTION.match(message)
        known = self._option_string_actions
        super().error(message + (_meant(unknown[1], known, OPTIONS_ELSEWHERE) if unknown else ""))


def _meant(name: str, known: Collection[str], elsewhere: Mapping[str, str]) -> str:
    """The end of a message about an unknown verb or option: what other programs call so, or what it resembles."""
    same = elsewhere.get(name)
    return f"; did you mean {same}?" if same in known else did_you_mean(name, known)


def build_parser(name: str, verb: Verb) -> argparse.ArgumentParser:
    """The argument parser of one verb; options may not be abbreviated, so that adding one never changes another."""
    parser = Parser(prog=f"spyglass {name}", description=verb.HELP, allow_abbrev=False)
    verb.add_arguments(parser)
    if not _hands_on(parser):
        add_config_option(parser)
    return parser


def _hands_on(parser: argparse.ArgumentParser) -> bool:
    """Whether the rest of the line goes to somebody else's parser."""
    return any(action.nargs == argparse.REMAINDER for action in parser._actions)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Options and other arguments in any order, unless `--` ends the options or a rest is handed on as it is.

    Raises:
        ConfigError: a file of options cannot be used.
    """
    if _hands_on(parser):
        return parser.parse_args(arguments)
    stated = arguments[: arguments.index("--")] if "--" in arguments else arguments
    for one in stated:  # before "-np 4" is read as -n with the value "p"
        if one in _SEVERAL_LETTERS and one not in parser._option_string_actions:
            parser.error(f"unrecognized arguments: {one}")
    read_config_file(parser, arguments)
    return parser.parse_args(arguments) if "--" in arguments else parser.parse_intermixed_args(arguments)


def refuse_empty(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Refuse a text or path that is empty, most often a shell variable that is not set.

    Left alone, a path without letters is the folder one stands in, and a name without letters reads as none given.
    Numbers and choices are left to their own readers.

    Raises:
        ConfigError: one is; the message says which, and what belongs there.
    """
    for before, text in zip(("", *arguments), arguments, strict=False):
        written = _OPTION_WITHOUT_VALUE.fullmatch(text)
        if text and not written:
            continue
        option = written[1] if written else before
        action = _taker(parser, option)
        if action is None:
            raise ConfigError("an argument is empty; state what is meant, or leave it out")
        if action.choices is None and action.type in (None, str, Path):
            what = option if option in action.option_strings else f"the argument {action.metavar or action.dest}"
            raise ConfigError(f"{what} is empty; --help says of it: {action.help}")


def _taker(parser: argparse.ArgumentParser, option: str) -> argparse.Action | None:
    """Who takes the argument after `option`: that option, if it takes one, or the only argument that has no option."""
    for action in parser._actions:
        if option in action.option_strings and action.nargs != 0:
            return action
    placed = [action for action in parser._actions if not action.option_strings]
    return placed[0] if len(placed) == 1 else None


def run_verb(name: str, arguments: Sequence[str]) -> int:
    """Run one verb; our own errors become one line on stderr and exit code 2."""
    verb = load_verb(name)
    parser = build_parser(name, verb)
    try:
        refuse_empty(parser, arguments)
        return verb.run(parse(parser, arguments))
    except SpyglassError as error:
        print(f"spyglass: error: {error}", file=sys.stderr)
        return USER_FAULT


def dispatch(arguments: Sequence[str]) -> int:
    """Do what a command line asks for; returns the exit code."""
    if len(arguments) > 1 and arguments[0] == "help":
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if arguments else USER_FAULT
    name, *rest = arguments
    if name in ("-V", "--version", "version"):
        print(f"spyglass {__version__}")
        return 0
    if name not in VERBS:
        known = f"unknown verb {name!r}; the verbs are {', '.join(VERBS)}"
        print(f"spyglass: error: {known}{_meant(name, VERBS, VERBS_ELSEWHERE)}", file=sys.stderr)
        return USER_FAULT
    return run_verb(name, rest)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `spyglass` command; returns the exit code."""
    _prepare_streams()
    _prepare_threads()
    try:
        try:
            return dispatch(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the shell's next line starts at the margin, whatever was being printed
        return INTERRUPTED
    except BrokenPipeError:  # the reader went away (`| head`): stop quietly
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is not None:  # of a file that somebody named: a folder without permission, a name too long
            print(f"spyglass: error: {error.filename} cannot be used: {error.strerror}", file=sys.stderr)
            return USER_FAULT
        if error.errno != errno.ENOSPC:
            raise
        _drop_output()
        print(f"spyglass: error: the output cannot be written: {error.strerror}", file=sys.stderr)
        return USER_FAULT


def _prepare_streams() -> None:
    """A stream that the shell has closed becomes an empty one; what a terminal cannot show is printed as an escape."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _prepare_threads() -> None:
    """Let a thread of the CPU kernels that waits for the others sleep after some 50 us, unless the user has said when.

    By default it holds its core for milliseconds, which keeps the thread it waits for from running where other programs
    want the cores too. OpenMP reads this once, when torch is imported.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _drop_output() -> None:
    """Keep the interpreter's exit from flushing into what cannot take it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
