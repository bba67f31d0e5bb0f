"""`spyglass eval`: ask a model fresh questions about the tiny world, or one's own, print its accuracy by kind."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spyglass.cli.options import (
    ADAPTER,
    adapters_of,
    add_engine_options,
    add_lora_option,
    add_model,
    engine_config,
    model_folder,
    note_bases,
    require_readable,
    stated_model,
)
from spyglass.config.engine import EngineConfig
from spyglass.config.fields import integer
from spyglass.errors import ConfigError

if TYPE_CHECKING:
    from spyglass.cli.own_questions import OwnQuestion
    from spyglass.engine import LLM, RequestOutput, SamplingParams
    from spyglass.prompt.chat import Effort
    from spyglass.prompt.tokens import Prompt
    from spyglass.tiny_world.evaluate import Report

HELP = (
    "Ask a model fresh questions about images of simple things, or with --data one's own; the last line printed is its "
    "overall accuracy."
)
_NUM = 200
_SPLITS = ("train", "test", "unseen")
_CONTROLS = ("shuffled", "grey")
_VARIANTS = ("roman", "negative", "french")
USES = "uses"  # all kinds of `tiny_world.uses`


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.usage = "spyglass eval [options] [MODEL]"
    add_model(parser)
    add_lora_option(parser)
    parser.add_argument(
        "--data",
        metavar="FILE",
        type=Path,
        help="chats whose last answers are the right ones, as for finetune; told apart by a column 'task', if any",
    )
    parser.add_argument("--num", type=integer, metavar="N", help="questions to ask (default: 200, of --data all)")
    parser.add_argument(
        "--seed", type=integer, metavar="N", default=0, help="another seed asks other questions (default: 0)"
    )
    parser.add_argument(
        "--split",
        choices=_SPLITS,
        default="test",
        help="questions of training, fresh ones, or fresh ones about colours and shapes never trained together",
    )
    parser.add_argument(
        "--control", choices=_CONTROLS, help="show the images of another question, or grey ones: must do badly"
    )
    parser.add_argument(
        "--kinds",
        metavar="KIND,KIND",
        help="kinds of questions to ask, by the names of the table; 'uses' for those as people put them to a server: "
        "images anywhere in a chat, first questions, what was never taught, JSON, tools",
    )
    parser.add_argument("--variant", choices=_VARIANTS, help="the task of a shipped adapter")
    parser.add_argument("--batch", type=integer, metavar="N", default=32, help="questions asked together (default: 32)")
    parser.add_argument(
        "--sheet", metavar="FILE", type=Path, help="draw a contact sheet (PNG) of right and wrong answers"
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Ask, print the table, write the sheet; the result is the exit code."""
    folder = model_folder(stated_model(args))
    options = engine_config(args)
    for name in ("num", "batch"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(f"--{name} is {getattr(args, name)}; it is at least 1")
    if args.sheet is not None and not args.sheet.parent.is_dir():
        raise ConfigError(f"--sheet {args.sheet}: there is no folder {args.sheet.parent}")
    if args.sheet is not None and args.sheet.is_dir():
        raise ConfigError(f"--sheet {args.sheet} is a folder; name the file to write")
    if args.seed < 0:
        raise ConfigError(f"--seed is {args.seed}; it is at least 0")
    require_readable(folder, options)
    own, kinds = _own_questions(args), _kinds(args)
    from spyglass.cli.own_questions import evaluate_own
    from spyglass.engine import LLM
    from spyglass.params.targets import describe_counts
    from spyglass.tiny_world.evaluate import evaluate

    engine: dict[str, Any] = {item.name: getattr(args, item.name) for item in fields(EngineConfig)}
    note_bases(adapters_of(args), folder)
    llm = LLM(folder, adapters=adapters_of(args), progress=True, **engine)
    if args.lora is not None:
        print(f"adapter {args.lora}: {describe_counts(llm.adapter_counts(ADAPTER))}", file=sys.stderr)
    elif args.variant is not None:
        print(
            f"spyglass: without --lora this is {llm.name} itself, at a task that it was not trained for",
            file=sys.stderr,
        )
    asked = llm if args.lora is None else _Adapted(llm)
    if own is not None:
        if llm.tokenizer is None:
            raise ConfigError(f"{folder} has no tokenizer.json, and chats are text; add the file")
        return _tell(evaluate_own(asked, own, llm.tokenizer, batch=args.batch, progress=True), args)
    report = evaluate(
        asked,
        _NUM if args.num is None else args.num,
        args.seed,
        split=args.split,
        control=args.control,
        variant=args.variant,
        kinds=kinds,
        batch=args.batch,
        progress=True,
    )
    return _tell(report, args)


def _own_questions(args: argparse.Namespace) -> list[OwnQuestion] | None:
    """The questions of `--data`, as many as are wanted; None without it."""
    if args.data is None:
        return None
    for name, default in (("seed", 0), ("split", "test"), ("control", None), ("variant", None), ("kinds", None)):
        if getattr(args, name) != default:
            raise ConfigError(f"--{name} is about the questions that eval makes itself; leave it or --data out")
    from spyglass.cli.own_questions import read_questions

    return read_questions(args.data)[: args.num]


def _kinds(args: argparse.Namespace) -> tuple[str, ...] | None:
    """The kinds of `--kinds`; None without it.

    Raises:
        ConfigError: a name that is none, or one that does not go with the split, the control or the variant.
    """
    if args.kinds is None:
        return None
    from spyglass.tiny_world.cases import kinds_of
    from spyglass.tiny_world.uses import use_kinds_of

    uses = () if args.control is not None or args.variant is not None else use_kinds_of(args.split)
    known = (*kinds_of(args.split, args.variant), *uses)
    names = [name.strip() for name in args.kinds.split(",")]
    asked = [kind for name in names for kind in (uses if name == USES and uses else (name,))]
    if unknown := [kind for kind in asked if kind not in known]:
        more = f", and {USES!r} for all of {', '.join(uses)}" if uses else ""
        raise ConfigError(f"--kinds: there is no kind {unknown[0]!r} here; there are {', '.join(known)}{more}")
    return tuple(asked)


def _tell(report: Report, args: argparse.Namespace) -> int:
    from spyglass.tiny_world.sheet import contact_sheet

    if (thoughts := report.thoughts()) is not None:
        print(thoughts)
    print(report.table(), flush=True)  # before the sheet: a disk that is full by now costs no answers
    if args.sheet is not None:
        contact_sheet(report.verdicts).save(args.sheet, format="PNG")
    return 0


class _Adapted:
    """The model with its adapter, as `evaluate` asks it."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self.config, self.tokenizer = llm, llm.config, llm.tokenizer

    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams,
        *,
        thinking: bool,
        effort: Effort | None,
    ) -> list[RequestOutput]:
        """Answers to conversations, in order."""
        return self._llm.chat(messages, params, thinking=thinking, effort=effort, adapter=ADAPTER)

    def generate(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """Answers to prompts, in order."""
        return self._llm.generate(prompts, params, adapter=ADAPTER)
