"""What a model that is being trained answers to chats, drawn with the very pass that trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from spyglass.prompt.answers import is_right
from spyglass.prompt.tokens import Prompt, TokenKind
from spyglass.train.data import Chat, Learner
from spyglass.train.packing import Sample

SHOWN = 3  # chats
MOST_TOKENS = 32  # of an answer that is shown
MOST_PASSES = 32  # over the chats: answers that need more end there
_LONGER = 16  # tokens that an answer may have more than the right one: it is wrong by then
_DRAFT = 64  # tokens of the right answer that one pass tries: each takes a row of logits
Logits = Callable[[Sequence[Sample]], torch.Tensor]  # fp32 [R, V] of the rows that samples learn


@dataclass(frozen=True, slots=True)
class Shown:
    """A chat whose last answer is asked for: its question, the right answer's tokens and the prompt before them."""

    question: str
    right_ids: tuple[int, ...]
    prompt: Prompt
    task: str


def shown_chats(chats: Sequence[Chat], learner: Learner, count: int = SHOWN) -> list[Shown]:
    """`count` of the chats (all, if they are fewer) up to their last answers, spread over the file from its start."""
    learner, found = replace(learner, loss_on="assistant"), []
    count = min(count, len(chats))
    for chat in (chats[number * len(chats) // count] for number in range(count)):
        sample = learner.sample(chat.messages, chat.tools)
        start = int(np.flatnonzero(~sample.learn_T)[-1]) + 1
        right_ids = tuple(sample.prompt.ids_T[start:-1].tolist())
        found.append(Shown(_question(chat.messages), right_ids, _first(sample.prompt, start), chat.task))
    return found


@torch.no_grad()
def answers(shown: Sequence[Shown], logits: Logits, learner: Learner, most: Sequence[int] | None = None) -> list[str]:
    """The likeliest token after another, until the model ends its answer, there are `most` (default `MOST_TOKENS`) or
    `MOST_PASSES` were made.

    Each pass tries the rest of the right answer as a draft and takes what of it is the likeliest, and one token more: a
    right answer takes one pass, another as many as it has differing tokens.
    """
    end = learner.tokenizer.special_id("<｜end▁of▁sentence｜>")
    assert end is not None, "chats end with it"
    limits = [MOST_TOKENS] * len(shown) if most is None else most
    drawn: list[list[int]] = [[] for _ in shown]
    for _ in range(MOST_PASSES):
        live = [n for n, ids in enumerate(drawn) if len(ids) < limits[n] and (not ids or ids[-1] != end)]
        if not live:
            break
        # of the right answer, one token less than may come
        drafts = [list(shown[n].right_ids[len(drawn[n]) : min(len(drawn[n]) + _DRAFT, limits[n] - 1)]) for n in live]
        samples = [_continued(shown[n].prompt, drawn[n], draft) for n, draft in zip(live, drafts, strict=True)]
        best_R = iter(logits(samples).argmax(-1).tolist())
        for n, draft in zip(live, drafts, strict=True):
            best = [next(best_R) for _ in range(len(draft) + 1)]
            same = next((i for i, token in enumerate(draft) if token != best[i]), len(draft))
            drawn[n] += best[: same + 1]
    return [learner.tokenizer.decode([token for token in ids if token != end]) for ids in drawn]


class ExactMatch:
    """How many last answers of held-out chats are right by task, as `spyglass eval --data` has it: the same words, and
    boxes that overlap the right ones by half. Answers are greedy, `most_tokens` and `most_chats` in a pass."""

    def __init__(
        self, shown: Sequence[Shown], logits: Logits, learner: Learner, *, most_tokens: int, most_chats: int
    ) -> None:
        self._logits, self._learner = logits, learner
        limit = learner.config.text.max_position_embeddings
        self._groups: list[list[Shown]] = []
        used = 0
        for chat in shown:
            tokens = len(chat.prompt) + len(chat.right_ids) + _LONGER
            if not self._groups or used + tokens > most_tokens or len(self._groups[-1]) == most_chats:
                self._groups.append([])
                used = 0
            self._groups[-1].append(chat)
            used += tokens
        self._most = [
            [min(len(chat.right_ids) + _LONGER, limit - len(chat.prompt)) for chat in group] for group in self._groups
        ]

    def __call__(self) -> dict[str, tuple[int, int]]:
        """Right answers and all answers of each task."""
        found: dict[str, tuple[int, int]] = {}
        for group, most in zip(self._groups, self._most, strict=True):
            said = answers(group, self._logits, self._learner, most)
            for chat, text in zip(group, said, strict=True):
                right, asked = found.get(chat.task, (0, 0))
                expected = self._learner.tokenizer.decode(chat.right_ids)
                found[chat.task] = (right + is_right(expected, text), asked + 1)
        return dict(sorted(found.items()))


def table(shown: Sequence[Shown], before: Sequence[str], after: Sequence[str], learner: Learner) -> str:
    """Questions with what was right, and what was said before and after training."""
    lines = ["answers before and after training:"]
    for chat, old, new in zip(shown, before, after, strict=True):
        lines.append(f"  {_short(chat.question)}")
        rows = ("right", learner.tokenizer.decode(chat.right_ids)), ("before", old), ("after", new)
        lines += [f"    {name:<7} {_short(text)}" for name, text in rows]
    return "\n".join(lines)


def _continued(prompt: Prompt, ids: Sequence[int], draft: Sequence[int]) -> Sample:
    """A sample of the prompt, the tokens and a draft; its targets are the draft's and one more, whatever it is."""
    more = len(ids) + len(draft) + 1
    whole = replace(
        prompt,
        ids_T=np.append(prompt.ids_T, np.array([*ids, *draft, 0], np.int32)),
        kinds_T=np.append(prompt.kinds_T, np.full(more, TokenKind.TEXT, np.int8)),
        image_row_T=np.append(prompt.image_row_T, np.full(more, -1, np.int32)),
        visible_T2=np.concatenate([prompt.visible_T2, np.zeros((more, 2), np.int32)]),
    )
    learn_T = np.zeros(len(whole), np.bool_)
    learn_T[-len(draft) - 1 :] = True
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
