"""What a model that is being trained answers to chats, drawn with the very pass that trains it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from spyglass.errors import PromptError
from spyglass.prompt.answers import is_right, may_become_right
from spyglass.prompt.tokens import Prompt, TokenKind
from spyglass.train.data import Chat, Learner
from spyglass.train.entries import expected_answer
from spyglass.train.packing import Sample

SHOWN = 3  # chats
MOST_TOKENS = 32  # of an answer that is shown
FEWEST_PASSES = 32  # that a measurement may take; with more than 16 answers it may take two for each
_LONGER = 16  # tokens that an answer may have more than the right one: it is wrong by then
_RUN = 8  # tokens of an answer, at most, that are looked for in the right one to go on from there
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


@dataclass(frozen=True, slots=True)
class _Drawing:
    """An answer under way: its chat, how many tokens it may have, and those that it has."""

    chat: Shown
    most: int
    ids: list[int] = field(default_factory=list)

    def ended(self, end: int) -> bool:
        return len(self.ids) >= self.most or self.ids[-1:] == [end]

    def draft(self) -> list[int]:
        """How the right answer goes on, one token less than may come: from behind the longest run of it that was drawn
        last, the nearest if there are several; without any, from behind as many tokens."""
        right, ids = self.chat.right_ids, tuple(self.ids)
        start = len(ids)
        for length in range(min(_RUN, len(ids)), 0, -1):
            places = [n for n in range(length, len(right) + 1) if right[n - length : n] == ids[-length:]]
            if places:
                start = min(places, key=lambda place: abs(place - len(ids)))
                break
        return list(right[start:][: self.most - 1 - len(ids)])


@torch.no_grad()
def _draw(group: Sequence[_Drawing], logits: Logits) -> None:
    """One pass over chats: what of each draft is the likeliest, and the likeliest token after that."""
    drafts = [each.draft() for each in group]
    samples = [_continued(each.chat.prompt, each.ids, draft) for each, draft in zip(group, drafts, strict=True)]
    best_R = iter(logits(samples).argmax(-1).tolist())
    for each, draft in zip(group, drafts, strict=True):
        best = [next(best_R) for _ in range(len(draft) + 1)]
        same = next((i for i, token in enumerate(draft) if token != best[i]), len(draft))
        each.ids.extend(best[: same + 1])


def answers(shown: Sequence[Shown], logits: Logits, learner: Learner) -> list[str]:
    """The likeliest token after another, until the model ends its answer or there are `MOST_TOKENS`.

    A pass tries the right answer as a draft, so a right one takes one pass and another a few for each difference.
    """
    end, drawn = _end(learner), [_Drawing(chat, MOST_TOKENS) for chat in shown]
    while live := [each for each in drawn if not each.ended(end)]:
        _draw(live, logits)
    return [_text(each, learner) for each in drawn]


def compared(chats: Sequence[Chat]) -> tuple[list[Chat], dict[str, int]]:
    """The chats whose last answers can be compared by drawing them, and how many cannot, by reason: what
    `spyglass eval --data` refuses, and answers behind reasoning, of which it draws up to 2,048 tokens."""
    found, left_out = [], Counter[str]()
    for chat in chats:
        try:
            expected_answer(chat.messages, chat.tools)
        except PromptError:
            left_out["without a question, or with tools"] += 1
            continue
        if chat.messages[-1].get("reasoning_content"):
            left_out["with reasoning"] += 1
        else:
            found.append(chat)
    return found, dict(left_out)


class ExactMatch:
    """How many last answers of held-out chats are right by task, as `spyglass eval --data` has it: the same words, and
    boxes that overlap the right ones by half. Answers are greedy and end 16 tokens beyond the right one.

    A pass holds `most_chats` of at most `most_tokens` together. An answer takes passes until it is over or cannot
    become right any more. A measurement ends after `FEWEST_PASSES`, or two for each answer if that is more; answers
    that are open by then are not counted, and `tell` gets how many.
    """

    def __init__(
        self,
        shown: Sequence[Shown],
        logits: Logits,
        learner: Learner,
        *,
        most_tokens: int,
        most_chats: int,
        tell: Callable[[str], None],
    ) -> None:
        self._shown, self._logits, self._learner, self._tell = shown, logits, learner, tell
        self._most_tokens, self._most_chats = most_tokens, most_chats
        self.most_passes = max(FEWEST_PASSES, 2 * len(shown))

    def __call__(self) -> dict[str, tuple[int, int]]:
        """Right answers and all answers of each task."""
        end, limit = _end(self._learner), self._learner.config.text.max_position_embeddings
        found: dict[str, tuple[int, int]] = {}
        waiting = deque(
            _Drawing(chat, min(len(chat.right_ids) + _LONGER, limit - len(chat.prompt))) for chat in self._shown
        )
        for _ in range(self.most_passes):
            group = self._group(waiting)
            if not group:
                break
            _draw(group, self._logits)
            for each in group:
                text, expected = _text(each, self._learner), self._learner.tokenizer.decode(each.chat.right_ids)
                if not each.ended(end) and may_become_right(expected, text):
                    waiting.append(each)  # behind the others, so that each has its share of the passes
                    continue
                right, asked = found.get(each.chat.task, (0, 0))
                found[each.chat.task] = (right + is_right(expected, text), asked + 1)
        if waiting:
            self._tell(f"held out: answers open after {self.most_passes} passes, which do not count: {len(waiting)}")
        return dict(sorted(found.items()))

    def _group(self, waiting: deque[_Drawing]) -> list[_Drawing]:
        """The chats of the next pass, taken from those that wait."""
        group: list[_Drawing] = []
        used = 0
        while waiting and len(group) < self._most_chats:
            used += len(waiting[0].chat.prompt) + waiting[0].most
            if group and used > self._most_tokens:
                break
            group.append(waiting.popleft())
        return group


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


def _end(learner: Learner) -> int:
    end = learner.tokenizer.special_id("<｜end▁of▁sentence｜>")
    assert end is not None, "chats end with it"
    return end


def _text(drawn: _Drawing, learner: Learner) -> str:
    end = _end(learner)
    return learner.tokenizer.decode([token for token in drawn.ids if token != end])


def _question(messages: Sequence[Mapping[str, Any]]) -> str:
    asked = next((message.get("content") for message in reversed(messages) if message.get("role") == "user"), "")
    parts = asked if isinstance(asked, list) else [{"type": "text", "text": asked or ""}]
    return " ".join(str(part.get("text", "")) if part.get("type") == "text" else "[image]" for part in parts)


def _short(text: str, most: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[:most]}…"
