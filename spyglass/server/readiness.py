"""Ready means that it has answered: one real token with every feature that this model offers, through the whole engine.

A feature that fails keeps `/health` at 503 and names itself; everything else goes on working.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from spyglass.engine.llm import LLM
from spyglass.engine.rehearsal import capture_steps, captures_ahead
from spyglass.engine.request import SamplingParams, Structured
from spyglass.engine.warm_up import blank, largest_images, noise
from spyglass.engine.worker import EngineWorker
from spyglass.errors import OverloadedError, SpyglassError
from spyglass.prompt.build import Part, prompt_from_parts

STALL_S = 120.0  # a step that takes longer is taken for stuck
AGAIN_S = 0.5  # between trials while the server is full
_OK = "ok"
_STARTING = "not tried yet"
_GRAPHS = "captured steps"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Trial:
    parts: list[Part]
    params: SamplingParams
    adapter: str | None = None


class Readiness:
    """What has been seen to work. `info` is what `/health` says besides."""

    def __init__(self, llm: LLM, worker: EngineWorker, stopping: Callable[[], bool], info: Mapping[str, Any]) -> None:
        self._llm, self._worker, self._stopping, self._info = llm, worker, stopping, info
        self._trials = _trials(llm)
        self._graphs = captures_ahead(llm.engine)
        self._seen = dict.fromkeys(((_GRAPHS,) if self._graphs else ()) + tuple(self._trials), _STARTING)

    async def try_all(self) -> None:
        """Capture what a GPU captures, then draw one token with each feature, one after the other."""
        if self._graphs:
            self._seen[_GRAPHS] = await self._capture()
        for feature, trial in self._trials.items():
            self._seen[feature] = await self._try(trial)
            if self._stopping():
                return
            if self._seen[feature] != _OK:
                _LOG.error("%s does not work: %s", feature, self._seen[feature])

    async def watch(self) -> None:
        """Log each stall once, when it is noticed."""
        noted = False
        while True:
            await asyncio.sleep(STALL_S / 10)
            stalled = self._worker.stats().step_s > STALL_S
            if stalled and not noted:
                _LOG.error("a step of the engine has taken more than %g s", STALL_S)
            noted = stalled

    @property
    def starting(self) -> bool:
        """Whether something has not been tried yet."""
        return _STARTING in self._seen.values()

    async def try_adapter(self, name: str) -> str | None:
        """Draw a token with an adapter that has come; why that does not work, None if it does."""
        seen = await self._try(_adapter_trial(self._llm, name))
        if seen == _OK:
            self._seen[_feature(name)] = seen
        return None if seen == _OK else seen

    def forget_adapter(self, name: str) -> None:
        self._seen.pop(_feature(name), None)

    def report(self) -> tuple[int, dict[str, Any]]:
        """Status and body of `/health`: 200 when everything works, else 503."""
        stats = self._worker.stats()
        state = "ok"
        failure = None if self._llm.ranks is None else self._llm.ranks.failure
        if failure is not None:
            state = f"failed: {failure}"
        elif self._stopping():
            state = "stopping"
        elif self.starting:
            state = "starting"
        elif stats.failing or any(seen != _OK for seen in self._seen.values()):
            state = "failing"
        elif stats.step_s > STALL_S:
            state = f"stalled: one step has taken {stats.step_s:.0f} s"
        return 200 if state == "ok" else 503, {"status": state, **self._info, "features": dict(self._seen)}

    async def _capture(self) -> str:
        llm = self._llm
        capture = partial(capture_steps, llm.engine, llm.loaded.model, adapters=bool(llm.adapters))
        try:
            await self._worker.between_steps(capture)
        except SpyglassError as error:
            return str(error)
        except Exception as error:  # as in `_try`
            _LOG.exception("capturing broke")
            return f"it broke ({type(error).__name__}); the log has the details"
        return _OK

    async def _try(self, trial: _Trial) -> str:
        while True:
            try:
                return await self._draw(trial)
            except OverloadedError:  # clients took all places first, which says nothing of the feature
                await asyncio.sleep(AGAIN_S)
            except SpyglassError as error:
                return str(error)
            except Exception as error:  # a task's top frame: whatever broke must show
                _LOG.exception("a trial broke")
                return f"it broke ({type(error).__name__}); the log has the details"

    async def _draw(self, trial: _Trial) -> str:
        prompt = prompt_from_parts(trial.parts, self._llm.config)
        # outside the engine's thread: clients may be served already
        request = await asyncio.to_thread(self._llm.engine.prepare, prompt, trial.params)
        submission = self._worker.submit([request], self._llm.adapter_use(trial.adapter))
        await submission.accepted()
        while mail := await submission.deltas():
            output = mail[-1][1].output
            if output is not None and (output.error or len(output.token_ids) != 1):
                return output.error or "no token was drawn"
        return _OK


def _trials(llm: LLM) -> dict[str, _Trial]:
    """The features that this model offers, each with the least that needs it."""
    one = SamplingParams(max_tokens=1)
    start = [llm.config.bos_token_id or 0]
    trials = {"text": _Trial([start], one)}
    if llm.config.vision is not None and llm.options.images:
        trials["images"] = _Trial([start, blank(largest_images(llm.config.vision)[0])], one)
    if llm.tokenizer is not None:
        form = Structured(kind="regex", value="[a-z]+")
        trials["structured answers"] = _Trial([start], SamplingParams(max_tokens=1, structured=form))
    return trials | {_feature(name): _adapter_trial(llm, name) for name in llm.adapters}


def _adapter_trial(llm: LLM, name: str) -> _Trial:
    """With an image where the adapter acts on images: it may break there and nowhere else."""
    parts: list[Part] = [[llm.config.bos_token_id or 0]]
    if llm.config.vision is not None and llm.adapter_use(name).vision_digest:
        parts.append(noise(largest_images(llm.config.vision)[0]))
    return _Trial(parts, SamplingParams(max_tokens=1), name)


def _feature(adapter: str) -> str:
    return f"adapter {adapter}"
