"""What a model that is being trained answers to a few of its chats, drawn with the very pass that trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from spyglass.prompt.tokens import Prompt, TokenKind
from spyglass.train.data import Chat, Learner
from spyglass.train.packing import Sample

SHOWN = 3  # chats
MOST_TOKENS = 32  # of an answer: each is a pass over the whole chat
Logits = Callable[[Sequence[Sample]], torch.Tensor]  # fp32 [R, V] of the rows that samples learn


@dataclass(frozen=True, slots=True)
class Shown:
    """A chat whose last answer is asked for: its question, the right answer, and the prompt before that."""

    question: str
    right: str
    prompt: Prompt


def shown_chats(chats: Sequence[Chat], learner: Learner, count: int = SHOWN) -> list[Shown]:
    """The first chats, up to their last answers."""
    learner, found = replace(learner, loss_on="assistant"), []
    for chat in chats[:count]:
        sample = learner.sample(chat.messages, chat.tools)
        start = int(np.flatnonzero(~sample.learn_T)[-1]) + 1
        right = learner.tokenizer.decode(sample.prompt.ids_T[start:-1].tolist())
        found.append(Shown(_question(chat.messages), right, _first(sample.prompt, start)))
    return found


@torch.no_grad()
def answers(shown: Sequence[Shown], logits: Logits, learner: Learner) -> list[str]:
    """The likeliest token after another, until the model ends its answer or there are `MOST_TOKENS`."""
    end = learner.tokenizer.special_id("<｜end▁of▁sentence｜>")
    drawn: list[list[int]] = [[] for _ in shown]
    for _ in range(MOST_TOKENS):
        live = [number for number, ids in enumerate(drawn) if not ids or ids[-1] != end]
        if not live:
            break
        best_R = logits([_next_token(shown[number].prompt, drawn[number]) for number in live]).argmax(-1)
        for number, token in zip(live, best_R.tolist(), strict=True):
            drawn[number].append(token)
    return [learner.tokenizer.decode([token for token in ids if token != end]) for ids in drawn]


def table(shown: Sequence[Shown], before: Sequence[str], after: Sequence[str]) -> str:
    """Questions with what was right, and what was said before and after training."""
    lines = ["answers before and after training:"]
    for chat, old, new in zip(shown, before, after, strict=True):
        lines.append(f"  {_short(chat.question)}")
        rows = ("right", chat.right), ("before", old), ("after", new)
        lines += [f"    {name:<7} {_short(text)}" for name, text in rows]
    return "\n".join(lines)


def _next_token(prompt: Prompt, ids: Sequence[int]) -> Sample:
    """A sample whose one target, whatever it is, comes after the prompt and the tokens."""
    more = len(ids) + 1
    whole = replace(
        prompt,
        ids_T=np.append(prompt.ids_T, np.array([*ids, 0], np.int32)),
        kinds_T=np.append(prompt.kinds_T, np.full(more, TokenKind.TEXT, np.int8)),
        image_row_T=np.append(prompt.image_row_T, np.full(more, -1, np.int32)),
        visible_T2=np.concatenate([prompt.visible_T2, np.zeros((more, 2), np.int32)]),
    )
    learn_T = np.zeros(len(whole), np.bool_)
    learn_T[-1] = True
    return Sample(prompt=whole, learn_T=learn_T)


def _first(prompt: Prompt, count: int) -> Prompt:
    """The first tokens of a prompt, behind all of its images."""
    return replace(
        prompt,
        ids_T=prompt.ids_T[:count],
        kinds_T=prompt.kinds_T[:count],
        image_row_T=prompt.image_row_T[:count],
        visible_T2=prompt.visible_T2[:count],
    )


def _question(messages: Sequence[Mapping[str, Any]]) -> str:
    asked = next((message.get("content") for message in reversed(messages) if message.get("role") == "user"), "")
    parts = asked if isinstance(asked, list) else [{"type": "text", "text": asked or ""}]
    return " ".join(str(part.get("text", "")) if part.get("type") == "text" else "[image]" for part in parts)


def _short(text: str, most: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}…"
