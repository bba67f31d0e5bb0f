"""The thread that owns an engine: what goes in comes out, to whom it belongs, and nobody is left waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from spyglass.config.model import ModelConfig
from spyglass.engine.request import Delta, SamplingParams
from spyglass.engine.sequence import Request
from spyglass.engine.worker import EngineWorker, ResponseStream
from spyglass.errors import CapacityError, OverloadedError, PromptError, SpyglassError
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import Prompt
from tests.scripted import ScriptedEngine
from tests.small_models import small_config

CONFIG: ModelConfig = small_config()


def prompt(*ids: int) -> Prompt:
    return prompt_from_parts([list(ids or (5,))], CONFIG)


def params(tokens: int = 3, answers: int = 1) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=tokens)] * answers


def requests(prompt: Prompt, params: list[SamplingParams]) -> list[Request]:
    return [Request(prompt=prompt, params=one) for one in params]


@asynccontextmanager
async def working(engine: ScriptedEngine, max_live: int = 100) -> AsyncIterator[EngineWorker]:
    worker = EngineWorker(engine, max_live=max_live)
    worker.start()
    try:
        yield worker
    finally:
        await asyncio.to_thread(worker.stop)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await test()

    asyncio.run(limited())


async def texts(submission: ResponseStream) -> dict[int, str]:
    """The whole text of each answer, put together from what came."""
    await submission.accepted()
    found: dict[int, str] = {}
    while mail := await submission.deltas():
        for index, delta in mail:
            found[index] = found.get(index, "") + delta.text
    return found


async def until(fact: Callable[[], bool]) -> None:
    while not fact():
        await asyncio.sleep(0.005)


def test_every_answer_of_a_call_arrives_whole_and_in_its_place() -> None:
    async def test() -> None:
        def script(prompt: Prompt, params: SamplingParams) -> list[str]:
            return [f"{prompt.ids_T[0]}.{step} " for step in range(params.max_tokens or 0)]

        async with working(ScriptedEngine(script)) as worker:
            calls = [worker.submit(requests(prompt(number), [*params(number), *params(2)])) for number in range(1, 9)]
            for number, found in enumerate(await asyncio.gather(*map(texts, calls)), 1):
                assert found == {
                    0: "".join(f"{number}.{step} " for step in range(number)),
                    1: f"{number}.0 {number}.1 ",
                }
            assert worker.stats().live == 0

    run(test)


def test_a_late_reader_finds_everything_merged_and_holds_nobody() -> None:
    async def test() -> None:
        engine = ScriptedEngine()
        async with working(engine) as worker:
            slow = worker.submit(requests(prompt(), params(500)))
            quick = worker.submit(requests(prompt(), params(20)))
            await slow.accepted()
            assert len((await texts(quick))[0].split()) == 20
            await until(lambda: not worker.stats().live)
            await asyncio.sleep(0)
            mail = await slow.deltas()
            assert len(mail) == 1 and mail[0][1].output is not None
            assert mail[0][1].text == "".join(f"{n} " for n in range(500)) and len(mail[0][1].token_ids) == 500
            assert await slow.deltas() == []

    run(test)


def test_what_the_engine_refuses_is_told_to_the_caller_and_the_other_answers_of_the_call_end() -> None:
    async def test() -> None:
        engine = ScriptedEngine()
        async with working(engine) as worker:
            for token, kind in ((66, PromptError), (67, RuntimeError)):
                refused = worker.submit(requests(prompt(token), params(answers=3)))
                with pytest.raises(kind, match=str(token)):
                    await refused.accepted()
            assert worker.stats().live == 0 and not engine.live

    run(test)


def test_a_call_that_is_refused_half_way_leaves_nothing_behind() -> None:
    class Second(ScriptedEngine):
        def submit(self, request: Request, **more: Any) -> int:
            if self.live:
                raise CapacityError("one at a time")
            return super().submit(request)

    async def test() -> None:
        engine = Second()
        async with working(engine) as worker:
            with pytest.raises(CapacityError, match="one at a time"):
                await worker.submit(requests(prompt(), params(answers=2))).accepted()
            assert worker.stats().live == 0 and not engine.live

    run(test)


def test_cancelling_frees_within_a_step_and_brings_nothing_more() -> None:
    async def test() -> None:
        engine = ScriptedEngine(pause_s=0.01)
        async with working(engine) as worker:
            submission = worker.submit(requests(prompt(), params(10_000, answers=2)))
            other = worker.submit(requests(prompt(), params(30)))
            await submission.accepted()
            await submission.deltas()
            worker.cancel(submission)
            steps = engine.steps
            await until(lambda: worker.stats().live == 1)
            assert engine.steps <= steps + 2
            worker.cancel(submission)
            assert len((await texts(other))[0].split()) == 30
            worker.cancel(other)
            await until(lambda: worker.stats().live == 0)

    run(test)


def test_more_than_may_be_under_way_is_refused_until_others_end() -> None:
    async def test() -> None:
        async with working(ScriptedEngine(pause_s=0.01), max_live=3) as worker:
            first = worker.submit(requests(prompt(), params(5, answers=2)))
            with pytest.raises(OverloadedError, match="2 answers are under way") as refusal:
                worker.submit(requests(prompt(), params(answers=2)))
            assert refusal.value.retry_after_s >= 1
            with pytest.raises(CapacityError, match="4 answers, 3 may"):
                worker.submit(requests(prompt(), params(answers=4)))
            second = worker.submit(requests(prompt(), params(5)))
            await asyncio.gather(texts(first), texts(second))
            await texts(worker.submit(requests(prompt(), params(answers=3))))

    run(test)


def test_a_step_that_raises_ends_its_requests_and_the_thread_goes_on() -> None:
    async def test() -> None:
        async with working(ScriptedEngine(faults=[2])) as worker:
            submission = worker.submit(requests(prompt(), params(5)))
            await submission.accepted()
            seen: list[Delta] = []
            while mail := await submission.deltas():
                seen += [delta for _, delta in mail]
            assert seen[-1].output is not None and seen[-1].output.error == "the step failed"
            assert (await texts(worker.submit(requests(prompt(), params(2)))))[0] == "0 1 "
            stats = worker.stats()
            assert (stats.live, stats.failed_steps, stats.failing) == (0, 1, False)

    run(test)


def test_an_engine_that_only_raises_is_given_up_and_said_to_fail_until_it_works() -> None:
    class Stuck(ScriptedEngine):
        broken = True

        def step(self, *more: Any) -> list[Delta]:
            if self.broken:
                raise RuntimeError("no step works")
            return super().step(*more)

    async def test() -> None:
        engine = Stuck()
        async with working(engine) as worker:
            submission = worker.submit(requests(prompt(), params()))
            await submission.accepted()
            ((_, delta),) = await submission.deltas()
            assert delta.output is not None and delta.output.error == "the engine failed"
            assert worker.stats().failing and not engine.live
            engine.broken = False
            assert (await texts(worker.submit(requests(prompt(), params(2)))))[0] == "0 1 "
            assert not worker.stats().failing

    run(test)


def test_answers_that_go_on_are_not_ended_by_steps_that_fail_around_them() -> None:
    class Half(ScriptedEngine):
        def step(self, deliver: Any = None) -> list[Delta]:
            deliver(super().step())
            raise RuntimeError("a prompt broke")

    async def test() -> None:
        async with working(Half()) as worker:
            assert (await texts(worker.submit(requests(prompt(), params(9)))))[0] == "0 1 2 3 4 5 6 7 8 "
            assert not worker.stats().failing

    run(test)


def test_when_the_thread_dies_everybody_is_told_and_nothing_more_is_taken() -> None:
    class Doomed(ScriptedEngine):
        def abort(self, request_id: int) -> Delta | None:
            raise RuntimeError("not even that works")

    async def test() -> None:
        async with working(Doomed(pause_s=0.01)) as worker:
            doomed, other = (
                worker.submit(requests(prompt(), params(1000))),
                worker.submit(requests(prompt(), params(1000))),
            )
            await other.accepted()
            worker.cancel(doomed)
            with pytest.raises(SpyglassError, match="the engine has stopped"):
                await texts(other)
            with pytest.raises(OverloadedError):
                worker.submit(requests(prompt(), params()))
            assert worker.stats().failing

    run(test)


@pytest.mark.parametrize(("tokens", "grace_s", "cut"), [(10, 5.0, False), (100_000, 0.1, True)])
def test_draining_lets_answers_end_and_after_the_grace_period_ends_them(tokens: int, grace_s: float, cut: bool) -> None:
    async def test() -> None:
        async with working(ScriptedEngine(pause_s=0.005)) as worker:
            submission = worker.submit(requests(prompt(), params(tokens)))
            await submission.accepted()
            draining = asyncio.create_task(worker.drain(grace_s))
            await asyncio.sleep(0.01)
            with pytest.raises(OverloadedError, match="shutting down"):
                worker.submit(requests(prompt(), params()))
            last: Delta | None = None
            while mail := await submission.deltas():
                last = mail[-1][1]
            assert last is not None and last.output is not None
            assert last.output.error == ("the server is shutting down" if cut else None)
            await draining

    run(test)


def test_work_between_steps_runs_in_the_engines_thread_and_its_errors_come_back() -> None:
    async def test() -> None:
        async with working(ScriptedEngine(pause_s=0.005)) as worker:
            submission = worker.submit(requests(prompt(), params(20)))
            names: list[str] = []
            await worker.between_steps(lambda: names.append(threading.current_thread().name))
            assert names == ["engine"]
            with pytest.raises(ZeroDivisionError):
                await worker.between_steps(lambda: print(1 // 0))
            assert len((await texts(submission))[0].split()) == 20

    run(test)


def test_a_step_that_takes_long_shows_in_the_state() -> None:
    async def test() -> None:
        async with working(ScriptedEngine(pause_s=0.3)) as worker:
            submission = worker.submit(requests(prompt(), params(1)))
            await submission.accepted()
            await until(lambda: worker.stats().step_s > 0.1)
            await texts(submission)
            await until(lambda: worker.stats().step_s == 0)

    run(test)


def test_a_reader_whose_event_loop_is_gone_is_cancelled() -> None:
    engine = ScriptedEngine(pause_s=0.005)
    worker = EngineWorker(engine, max_live=10)
    worker.start()

    async def leave() -> None:
        await worker.submit(requests(prompt(), params(100_000))).accepted()

    asyncio.run(leave())
    while engine.live:
        time.sleep(0.01)
    assert not engine.live and worker.stats().live == 0
    worker.stop()
