"""`spyglass run`: ask a checkpoint about images, or talk to it; the answer streams, the numbers go to stderr."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spyglass.cli.batch import output_path, run_file
from spyglass.cli.chat_session import IMAGE_SUFFIXES, Chat
from spyglass.cli.options import (
    ADAPTER,
    ALIASES,
    MODEL_FORMS,
    adapters_by_name,
    add_engine_options,
    add_model_option,
    engine_config,
    model_folder,
    names_model,
    note_bases,
    require_readable,
    stated_model,
    told_adapters,
)
from spyglass.cli.talk import Talk
from spyglass.config.engine import EngineConfig
from spyglass.config.fields import integer, number
from spyglass.config.shipped import default_model, model_name
from spyglass.errors import ConfigError, PromptError
from spyglass.progress import tell

if TYPE_CHECKING:
    from spyglass.engine import LLM

HELP = "Ask a model about images, or talk to it: with a question once, without one as a chat."
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.usage = (
        "spyglass run [options] [MODEL] [QUESTION]"  # all of them would hide the error they are printed above
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL QUESTION",
        help=f"one argument is the question, without any it is standard input, or a chat on a terminal; before it may "
        f"stand a model: {MODEL_FORMS} (default: {default_model()})",
    )
    add_model_option(parser)
    parser.set_defaults(model=None)
    parser.add_argument("--prompt", *ALIASES["prompt"], metavar="TEXT", help="the question, as an option")
    parser.add_argument(
        "--batch", metavar="FILE", type=Path, help="answer a file of OpenAI batch lines (JSONL) instead of a question"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="answers of --batch (default: FILE with .answers.jsonl); resumable"
    )
    add_talk_options(parser, batch="; with --batch NAME=DIR, for lines to choose by `model`")


def add_talk_options(parser: argparse.ArgumentParser, *, batch: str = "") -> None:
    """What may be said of a conversation, and of the engine beneath it. `batch`: what help says of adapters besides."""
    parser.add_argument(
        "--image",
        metavar="PHOTO",
        type=Path,
        action="append",
        default=[],
        help="an image file; for several: --image ONE --image TWO",
    )
    parser.add_argument(
        "--lora",
        metavar="DIR",
        action="append",
        default=[],
        help=f"use an adapter: a PEFT folder{told_adapters()}{batch}",
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="system prompt: what the model is told before the conversation"
    )
    parser.add_argument(
        "--max-tokens",
        *ALIASES["max_tokens"],
        type=integer,
        metavar="N",
        help="most tokens of an answer (default: 256)",
    )
    parser.add_argument(
        "--temperature", *ALIASES["temperature"], type=number, metavar="X",
        help="0: always the likeliest token (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", type=number, metavar="X", help="draw from the likeliest tokens that make up this share"
    )
    parser.add_argument("--top-k", type=integer, metavar="N", help="draw from this many likeliest tokens")
    parser.add_argument(
        "--min-p", type=number, metavar="X", help="leave out tokens less than X times as likely as the likeliest"
    )
    parser.add_argument("--seed", type=integer, metavar="N", help="the same seed gives the same answer")
    parser.add_argument("--thinking", choices=("on", "off"), default="off", help="reason before answering")
    parser.add_argument("--effort", metavar="LEVEL", help="how much to reason, with --thinking on: low, high, max")
    parser.add_argument("-q", "--quiet", action="store_true", help="print the answer alone, no numbers and remarks")
    parser.add_argument("--no-stream", action="store_true", help="print the answer when it is complete")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer one question, or hold a chat; the result is the exit code."""
    words = args.words if args.prompt is None else [*args.words, args.prompt]
    placed, args.question = _model_and_question(words, args.model_option, is_named=args.prompt is not None)
    args.model = placed or args.model  # of a file of options
    folder = model_folder(stated_model(args))
    _check(args, folder)
    output = None if args.batch is None else output_path(args.batch, args.output)
    question = None if args.batch else _question(args.question)
    llm = _load(args, folder)
    if output is not None:
        return run_file(llm, args.batch, output)
    talk = _talk(args, llm)
    if question is None:
        Chat(talk, quiet=args.quiet).run(args.image)
        return 0
    if args.question and os.path.isfile(args.question) and not args.quiet:
        tell(f"the question is the name of a file; to show it as an image: --image {args.question}")
    talk.ask(question, args.image)
    return 0


def chat(args: argparse.Namespace) -> int:
    """`spyglass chat`: the same without a question."""
    args.question = args.batch = args.output = None
    folder = model_folder(stated_model(args))
    _check(args, folder)
    Chat(_talk(args, _load(args, folder)), quiet=args.quiet).run(args.image)
    return 0


def _load(args: argparse.Namespace, folder: Path) -> LLM:
    """The model with its adapters, and remarks on both."""
    from spyglass.checkpoint.random import RANDOM_WEIGHTS  # after the cheap checks: these load torch
    from spyglass.engine import LLM
    from spyglass.params.targets import describe_counts

    engine: dict[str, Any] = {item.name: getattr(args, item.name) for item in fields(EngineConfig)}
    adapters = _adapters(args, folder)
    if not args.quiet:
        note_bases(adapters, folder)
    llm = LLM(folder, adapters=adapters, progress=not args.quiet, **engine)
    if args.quiet:
        return llm
    for name, place in adapters.items():
        tell(f"adapter {place}: {describe_counts(llm.adapter_counts(name))}")
    if llm.options.load == "dummy" or llm.config.informational.get(RANDOM_WEIGHTS):
        tell(f"{folder} has random weights: its words are noise")
    return llm


def _talk(args: argparse.Namespace, llm: LLM) -> Talk:
    from spyglass.engine import SamplingParams

    stated = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    talk = Talk(
        llm,
        SamplingParams(**stated),
        thinking=args.thinking == "on",
        effort=args.effort,
        stream=not args.no_stream,
        note=_say_nothing if args.quiet else tell,
    )
    if args.system is not None:
        talk.messages.append({"role": "system", "content": args.system})
    return talk


def _say_nothing(text: str) -> None:
    """What `--quiet` tells."""


def _model_and_question(
    words: Sequence[str], model_option: str | None, *, is_named: bool
) -> tuple[str | None, str | None]:
    """What the arguments without an option are; the last is the question if it `is_named` so by an option.

    Raises:
        ConfigError: there are too many, or the only one names a model, which is never meant as a question.
    """
    if len(words) > 2 or (len(words) == 2 and model_option is not None):
        raise ConfigError(f'{words[-1]!r} is one argument too many; quote the question: "{" ".join(words)}"')
    if len(words) == 2:
        _refuse_question(*words)
        return words[0], words[1]
    question = words[0] if words else None
    if question is not None and model_option is None and not is_named and names_model(question):
        raise ConfigError(
            f"{question!r} names a model, and stands where the question is; say `spyglass chat {question}` to talk to "
            f'it, or `spyglass run {question} "your question"`'
        )
    return None, question


def _refuse_question(model: str, question: str) -> None:
    """Raises ConfigError where what stands in a model's place is an image, or a question before an image."""
    images = [word for word in (model, question) if Path(word).suffix.lower() in IMAGE_SUFFIXES]
    if images and " " not in images[0] and not os.path.isdir(model):
        said = (
            f'"{question}"'
            if images[0] == model
            else f'{model} "your question"'
            if names_model(model)
            else f'"{model}"'
        )
        raise ConfigError(
            f"an image is shown with --image, and what stands before a question is a model; say "
            f"`spyglass run --image {images[0]} {said}`"
        )


def _check(args: argparse.Namespace, folder: Path) -> None:
    """Refuse what can be seen to go wrong before a model is loaded, which may take minutes."""
    from spyglass.prompt.chat import ChatOptions, check_options
    from spyglass.prompt.decode import open_image

    options = engine_config(args)
    _check_batch(args)
    model = require_readable(folder, options)
    _adapters(args, folder)
    check_options(ChatOptions(thinking=args.thinking == "on", effort=args.effort))
    if args.image and model is not None and model.vision is None:
        raise PromptError(f"{folder} is a text-only checkpoint and takes no images; leave --image out")
    if len(args.image) > options.images:
        raise PromptError(
            f"--image is given {len(args.image)} times with --images {options.images}; name fewer, or raise --images"
        )
    for image in args.image:
        open_image(image, name=str(image))


def _check_batch(args: argparse.Namespace) -> None:
    """Lines of a batch state their own questions and options; what would have no effect is refused."""
    if args.batch is None:
        if args.output is not None:
            raise ConfigError("--output goes with --batch; a single answer goes to standard output")
        return
    given = [name for name in _SAMPLING if getattr(args, name) is not None]
    given += [name for name in ("question", "image", "system", "effort", "no_stream") if getattr(args, name)]
    given += ["thinking"] if args.thinking == "on" else []
    if given:
        shown = ", ".join("the question" if name == "question" else "--" + name.replace("_", "-") for name in given)
        raise ConfigError(f"{shown}: without effect with --batch; each line of the file states its own")
    if not args.batch.is_file():
        raise ConfigError(f"--batch {args.batch} is no file")


def _adapters(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Adapters by name: those that lines of a batch choose from, or the one of a question."""
    if args.batch is not None:
        return adapters_by_name(args.lora, (model_name(folder),))
    if len(args.lora) > 1:
        raise ConfigError(f"--lora is given {len(args.lora)} times; a question uses one adapter")
    return {ADAPTER: args.lora[0]} if args.lora else {}


def _question(stated: str | None) -> str | None:
    """The question that was given, or all of standard input; None on a terminal, where a chat begins."""
    if stated is not None or sys.stdin.isatty():
        return stated
    text = sys.stdin.read().strip()
    if not text:
        raise PromptError("there is no question: give one as an argument or on standard input")
    return text
