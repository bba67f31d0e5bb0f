"""Chats to learn from, checked one by one before anything is loaded, packed by token count.

A chat is `{"messages": [...]}` in OpenAI form, and `"tools"` if it has some; the last message is the assistant's.
Images are data URLs, or paths seen from the file's folder; other trainers' shapes become this in `entries`. Learnt are
the tokens that the model would have sampled itself: all after `<｜Assistant｜>` and the mark that begins or skips
reasoning, up to and with the end-of-sentence token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spyglass.config.model import ModelConfig
from spyglass.config.training import LossOn
from spyglass.errors import ConfigError, PromptError
from spyglass.progress import Progress
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.chat import ChatOptions, Effort, ImageRef, RenderedChat, SpecialPiece, encode_chat, render_chat
from spyglass.prompt.decode import CHAT_RULES, PYTHON_LIMITS
from spyglass.prompt.placeholder import resolve_placeholder
from spyglass.prompt.tokenizer import PromptTokenizer
from spyglass.train.entries import Entry, RawChat, chat_of, read_entries
from spyglass.train.packing import Sample

_ASSISTANT, _END, _THINK, _NO_THINK = "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>"
_MESSAGE_KEYS = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id", "prefix")
_MOST_PLANNED = 20_000_000  # chats of all passes: some ten seconds
# what a model points with is a token of its own in an answer, as it will be when the model says it (spec v4 9.8)
_TAGS = re.compile(r"(<｜/?(?:ref|box|point|polygon)｜>)")


@dataclass(frozen=True, slots=True)
class Learner:
    """How chats become samples: the model they are for, its tokenizer, and what is learnt."""

    config: ModelConfig
    tokenizer: PromptTokenizer
    loss_on: LossOn = "assistant"
    effort: Effort | None = None  # of answers with reasoning, as in `ChatOptions`

    def sample(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        response_format: Mapping[str, Any] | None = None,
    ) -> Sample:
        """A whole chat; `reasoning_content` of its last message becomes reasoning before the answer.

        Earlier reasoning is left out, as it is when the model answers. The last message may call tools.
        `response_format` as in the OpenAI request: the prompt says it.

        Raises:
            PromptError: malformed messages or images, or a chat that does not end with an answer.
        """
        parts: list[list[int] | ImageRef] = []
        learnt: list[bool] = []
        for piece, wanted in self._pieces(messages, tools, response_format):
            for part in encode_chat(RenderedChat((piece,)), self.tokenizer):
                if isinstance(part, list):
                    learnt += [wanted] * len(part)
                if parts and isinstance(part, list) and isinstance(parts[-1], list):
                    parts[-1] += part
                else:
                    parts.append(part)
        placeholder = resolve_placeholder(self.config, self.tokenizer)
        prompt = prompt_from_parts(
            parts, self.config, rules=CHAT_RULES, limits=PYTHON_LIMITS, placeholder=placeholder, with_digests=False
        )
        learn_T = np.zeros(len(prompt), np.bool_)
        learn_T[prompt.ids_T >= 0] = learnt
        learn_T[0] = False
        return Sample(prompt=prompt, learn_T=learn_T)

    def _pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        response_format: Mapping[str, Any] | None,
    ) -> Iterator[tuple[Any, bool]]:
        """Pieces of the rendered chat, and whether their tokens are learnt."""
        everything, answering, previous = self.loss_on == "all", False, ""
        for piece in self._rendered(messages, tools, response_format):
            spelling = piece.spelling if isinstance(piece, SpecialPiece) else ""
            starts = previous == _ASSISTANT and spelling in (_THINK, _NO_THINK)
            wanted = everything or (answering and not starts)
            for part in self._tagged(piece) if answering and isinstance(piece, str) else [piece]:
                yield part, wanted
            if spelling == _ASSISTANT:
                answering = True
            elif spelling == _END:
                answering = False
            previous = spelling

    def _tagged(self, text: str) -> list[str | SpecialPiece]:
        """A text of the model, with the grounding tags that its tokenizer has as special tokens."""
        parts = [part for part in _TAGS.split(text) if part]
        known = [_TAGS.fullmatch(part) and self.tokenizer.special_id(part) is not None for part in parts]
        return [SpecialPiece(part) if tag else part for part, tag in zip(parts, known, strict=True)]

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        response_format: Mapping[str, Any] | None,
    ) -> list[Any]:
        """Pieces up to the end of the last answer. The renderer drops reasoning that is past, so the last one's is put
        where the model would have written it."""
        last = messages[-1] if messages else {}
        if not isinstance(last, Mapping) or last.get("role") != "assistant":
            raise PromptError("the last message must be the assistant's: it is what is learnt")
        if last.get("prefix"):
            raise PromptError(
                "the last message has prefix set, so it has no end that could be learnt; leave prefix out"
            )
        options = ChatOptions(tools=tools, response_format=response_format)
        whole = list(render_chat([*messages, *_results(last)], self.config, options).pieces)
        ends = [place for place, piece in enumerate(whole) if piece == SpecialPiece(_END)]
        reasoning = last.get("reasoning_content")
        if any(whole[end - 1] == SpecialPiece(_NO_THINK) for end in (ends[:-1] if reasoning else ends)):
            raise PromptError("an answer of the assistant is empty, and would teach it to say nothing; leave it out")
        if not reasoning:
            return whole[: ends[-1] + 1]
        starts = [place for place, piece in enumerate(whole[: ends[-1]]) if piece == SpecialPiece(_ASSISTANT)]
        answer = whole[starts[-1] + 2 : ends[-1] + 1]
        options = replace(options, thinking=True, effort=self.effort)
        question = render_chat(messages[:-1], self.config, options).pieces
        return [*question, reasoning, SpecialPiece(_NO_THINK), *answer]


def _results(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Stand-ins for the results of calls, without which none is rendered; what they say is cut off again."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    ids = [call["id"] for call in calls if isinstance(call, Mapping) and "id" in call]
    return [{"role": "tool", "tool_call_id": each, "content": ""} for each in ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One line of the file: its number from 1, its content, and how many tokens it takes and teaches.

    `digest` covers what is written and every pixel seen. `task`, `ignored`: as in `RawChat`.
    """

    line: int
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    tokens: int
    targets: int
    images: int
    digest: bytes
    task: str
    ignored: frozenset[str]


def read_chats(
    path: Path, learner: Learner, *, most_tokens: int, skip_bad: bool = False, progress: bool = True
) -> tuple[list[Chat], list[str]]:
    """The chats of a file, every one of them rendered and its images decoded once, and what is wrong with the others.

    `most_tokens` a chat may have. What a file may hold: `spyglass.train.entries`.

    Raises:
        PromptError: an entry cannot be used and `skip_bad` is not set (the message lists all of them), none can, or
            the file cannot be read.
    """
    entries = read_entries(path)
    chats, faults = [], []
    for entry in Progress(entries, total=len(entries), desc="checking", unit="line", show=progress):
        try:
            raw = chat_of(_sound(entry), path.parent)
            chats.append(_chat(entry, raw, learner, most_tokens))
        except PromptError as error:
            faults.append(f"{entry.place}: {error}")
    if faults and not skip_bad:
        total = len(chats) + len(faults)
        listed = "\n  ".join(faults)
        raise PromptError(
            f"{path}: {len(faults)} of {total} lines cannot be used; mend them, or leave them out with --skip-bad\n"
            f"  {listed}"
        )
    if not chats:
        raise PromptError(f'{path} has no chat to learn from; it needs lines of the form {{"messages": [...]}}')
    return chats, faults


def _sound(entry: Entry) -> Any:
    if entry.fault is not None:
        raise PromptError(entry.fault)
    return entry.value


def _chat(entry: Entry, raw: RawChat, learner: Learner, most_tokens: int) -> Chat:
    for place, message in enumerate(raw.messages):
        _refuse_unknown(message, place)
    sample = learner.sample(raw.messages, raw.tools)
    tokens, targets = len(sample.prompt), len(sample.rows)
    if tokens > most_tokens:
        raise PromptError(f"{tokens} tokens, and a batch takes {most_tokens}; raise --batch-tokens or shorten the chat")
    if tokens > (most := learner.config.text.max_position_embeddings):
        raise PromptError(f"{tokens} tokens, and the model reads {most} (max_position_embeddings); shorten the chat")
    content = hashlib.blake2b(json.dumps(entry.value, default=repr).encode(), digest_size=16)
    for patches in sample.prompt.patches:
        content.update(patches.data)
    return Chat(
        line=entry.number,
        messages=raw.messages,
        tools=raw.tools,
        tokens=tokens,
        targets=targets,
        images=len(sample.prompt.patches),
        digest=content.digest(),
        task=raw.task,
        ignored=raw.ignored,
    )


def _refuse_unknown(message: Any, place: int) -> None:
    """Fields of a message that are not rendered: they may say what is learned (`weight`) or be it (`thinking`)."""
    if not isinstance(message, dict):
        return
    unknown = sorted(k for k, value in message.items() if k not in _MESSAGE_KEYS and value not in (None, "", [], {}))
    if unknown:
        raise PromptError(
            f"messages[{place}] has the unknown key {unknown[0]!r}; those known are {', '.join(_MESSAGE_KEYS)}"
        )


class Batches:
    """Which chats each micro-batch has: every epoch all of them, shuffled anew, filled up to `most_tokens`
    or `most_chats` in order.

    A function of the seed and the micro-batch's number alone, so a run that is resumed meets the same ones.
    """

    def __init__(self, tokens: Sequence[int], *, most_tokens: int, seed: int, most_chats: int | None = None) -> None:
        self._tokens, self._most, self._seed, self._most_chats = tokens, most_tokens, seed, most_chats
        self._plan: list[list[int]] = []
        self._epochs = 0

    def __getitem__(self, number: int) -> list[int]:
        while number >= len(self._plan):
            self._add_epoch()
        return self._plan[number]

    def count(self, epochs: int) -> int:
        """Micro-batches of the first epochs together, all of which are planned for it.

        Raises:
            ConfigError: that would take long.
        """
        if epochs > 1 and epochs * len(self._tokens) > _MOST_PLANNED:
            raise ConfigError(
                f"{epochs} passes over {len(self._tokens)} chats are too many to plan; say how many steps"
            )
        fresh = Batches(self._tokens, most_tokens=self._most, seed=self._seed, most_chats=self._most_chats)
        for _ in range(epochs):
            fresh._add_epoch()
        return len(fresh._plan)

    def _add_epoch(self) -> None:
        order = np.random.default_rng([self._seed, self._epochs]).permutation(len(self._tokens))
        self._epochs += 1
        used = self._most + 1
        for chat in order.tolist():
            if used + self._tokens[chat] > self._most or len(self._plan[-1]) == self._most_chats:
                self._plan.append([])
                used = 0
            self._plan[-1].append(chat)
            used += self._tokens[chat]


class Feed:
    """Samples by micro-batch number; those of the next are made by a thread while the model is busy with this one.

    `stride`: how far apart the numbers are that this process asks for.
    """

    def __init__(self, chats: Sequence[Chat], batches: Batches, learner: Learner, *, stride: int = 1) -> None:
        self.learner = learner
        self._chats, self._batches, self._stride = chats, batches, stride
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chats")
        self._ahead: dict[int, Future[list[Sample]]] = {}

    def __call__(self, number: int) -> list[Sample]:
        """The samples of micro-batch `number`."""
        made = self._ahead.pop(number, None)
        samples = self._make(number) if made is None else made.result()
        following = number + self._stride
        self._ahead = {following: self._thread.submit(self._make, following)}
        return samples

    def digest(self) -> str:
        """A hash of all chats and what their images show."""
        return hashlib.blake2b(b"".join(chat.digest for chat in self._chats), digest_size=16).hexdigest()

    def _make(self, number: int) -> list[Sample]:
        chats = [self._chats[index] for index in self._batches[number]]
        return [self.learner.sample(chat.messages, chat.tools) for chat in chats]
