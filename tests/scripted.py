"""An engine that says what a test tells it to, through the worker's interface: one piece of text a step and answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spyglass.engine.request import Delta, FinishReason, RequestOutput, SamplingParams, Usage
from spyglass.engine.sequence import Request
from spyglass.engine.shares import ANYBODY, Client
from spyglass.engine.stats import EngineStats
from spyglass.errors import PromptError
from spyglass.lora.use import NO_ADAPTER, AdapterHandle
from spyglass.prompt.tokens import Prompt

Script = Callable[[Prompt, SamplingParams], Sequence[str]]


@dataclass
class Answer:
    """One request on its way."""

    number: int
    prompt: Prompt
    params: SamplingParams
    pieces: list[str]
    said: list[str] = field(default_factory=list)


def counting(prompt: Prompt, params: SamplingParams) -> list[str]:
    """As many pieces as tokens are allowed."""
    return [f"{number} " for number in range(params.max_tokens or 0)]


class ScriptedEngine:
    """`pause_s` is how long a step takes; `faults` are steps (counted from 1) that raise. A prompt of id 66 is refused,
    id 67 is a fault of the engine's own."""

    def __init__(self, script: Script = counting, pause_s: float = 0.0, faults: Sequence[int] = ()) -> None:
        self.script, self.pause_s, self.faults = script, pause_s, set(faults)
        self.live: dict[int, Answer] = {}
        self.steps = self._next = 0
        self.lost: list[Delta] = []
        self.before_step: Callable[[], object] = lambda: None

    @property
    def has_work(self) -> bool:
        return bool(self.live or self.lost)

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.live), steps=self.steps)

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Request:
        """As `Engine`."""
        return Request(prompt=prompt, params=params)

    def submit(self, request: Request, *, adapter: AdapterHandle = NO_ADAPTER, client: Client = ANYBODY) -> int:
        prompt, params = request.prompt, request.params
        if 66 in prompt.ids_T:
            raise PromptError("66 is refused")
        if 67 in prompt.ids_T:
            raise RuntimeError("67 is a fault")
        self._next += 1
        self.live[self._next] = Answer(self._next, prompt, params, list(self.script(prompt, params)))
        return self._next

    def step(self, deliver: object = None) -> list[Delta]:
        if self.lost:
            lost, self.lost = self.lost, []
            return lost
        self.steps += 1
        self.before_step()
        time.sleep(self.pause_s)
        if self.steps in self.faults:
            self.lost = [self._last(answer, "abort", "", "the step failed") for answer in list(self.live.values())]
            raise RuntimeError("out of luck")
        return [self._say(answer) for answer in list(self.live.values())]

    def abort(self, request_id: int) -> Delta | None:
        answer = self.live.get(request_id)
        return None if answer is None else self._last(answer, "abort", "", None)

    def _say(self, answer: Answer) -> Delta:
        text = answer.pieces[len(answer.said)] if answer.pieces else ""
        answer.said.append(text)
        if len(answer.said) >= len(answer.pieces):
            return self._last(answer, "stop", text, None)
        return Delta(request_id=answer.number, text=text, token_ids=(len(answer.said),))

    def _last(self, answer: Answer, reason: FinishReason, text: str, error: str | None) -> Delta:
        del self.live[answer.number]
        count = len(answer.said)
        output = RequestOutput(
            request_id=answer.number,
            text="".join(answer.said),
            token_ids=tuple(range(1, count + 1)),
            finish_reason=reason,
            usage=Usage(prompt_tokens=len(answer.prompt), image_tokens=0, completion_tokens=count),
            error=error,
        )
        ids = () if reason == "abort" else (count,)
        return Delta(request_id=answer.number, text=text, token_ids=ids, finish_reason=reason, output=output)
