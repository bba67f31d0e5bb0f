"""Attackers beside well-behaved clients of one server, and what the clients notice of them.

`python -m scripts.attack --seconds 600 --seed 0`. The law: whatever one client sends, another one's stream pauses at
most 0.25 s, `/health` answers within 0.25 s, memory comes back, and what is refused is refused within 1 s of its last
byte. A quarter of the time the three clients are alone, which is what a machine that is slow or busy is judged by, half
of it beside attackers, whose bodies are made beforehand. Every answer of theirs is known beforehand. In the last
quarter files are attacked, which no server reads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from scripts.soak import Question, beside, memory, questions, read, serving
from spyglass.checkpoint.random import new_checkpoint

LAW_SECONDS, REFUSAL_SECONDS = 0.25, 1.0
SHOWN, SHOWN_SECONDS = 6, 0.15  # how many of the longest pauses are told, with what was under way, and how long ones
LOOP_SECONDS = 2.5  # what a busy machine may keep the event loop waiting
TRIED = {"grammar": 1.0}  # what must be tried to be refused has processor seconds of its own
# Where others use the machine too: what is noticed at most, and in all but a hundredth of cases, is so many times the
# longest that the clients noticed alone, and so many seconds.
LOOSE = {"": (10.0, 2.0), " p99": (3.0, LAW_SECONDS)}
# Bytes that a server may keep after attacks: arenas of its threads, and what kernels keep for the longest prompt met
# (packed rows of linear maps and outputs of experts, 64 MB each; decoded weights).
MOST_GROWTH = 384 << 20
SERVER = (
    *("--port", "0", "--device", "cpu", "--dtype", "float32", "--numerics", "plain", "--threads", "1"),
    *("--max-sequences", "16", "--max-waiting", "16", "--grace-seconds", "5", "--model-name", "tiny"),
    *("--cache-bytes", str(150 << 20), "--prefix-cache-bytes", str(32 << 20), "--image-cache-bytes", str(1 << 20)),
    *("--log-level", "error", "--allow-adapter-loading"),
)


@dataclass(slots=True)
class Noticed:
    """What well-behaved clients notice in a while: seconds, and answers that are not theirs."""

    pauses: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    longest: list[tuple[float, float, str]] = field(default_factory=list)  # pauses, their ends, the questions

    def paused(self, seconds: float, now: float, question: Question) -> None:
        """Note a pause of a stream, which has ended now."""
        self.pauses.append(seconds)
        if seconds > SHOWN_SECONDS:
            what = f"{question.path} {str(question.body)[:80]}"
            self.longest = sorted([*self.longest, (seconds, now, what)], reverse=True)[:SHOWN]

    def told(self) -> dict[str, float]:
        """The longest of each, and how many answers came."""
        return {
            "pause": max(self.pauses, default=0.0),
            "pause p99": _quantile(self.pauses, 0.99),
            "health": max(self.health, default=0.0),
            "health p99": _quantile(self.health, 0.99),
            "first token": max(self.firsts, default=0.0),
            "answers": float(self.answers),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of a whole run: what was noticed alone and beside attackers, what these saw, and memory in bytes."""

    alone: Noticed
    beside: Noticed
    attackers: Mapping[str, Any]
    files: Mapping[str, Any]
    before: int
    peak: int
    after: int
    loop: Mapping[str, int]

    def table(self) -> list[str]:
        """Every figure of the law against its bound, as rows of a Markdown table."""
        alone, beside = self.alone.told(), self.beside.told()
        late = self.loop["+Inf"] - self.loop[str(LAW_SECONDS)]
        wrong = len(self.alone.wrong + self.beside.wrong + self.attackers["wrong"] + self.files["wrong"])
        rows: list[tuple[str, float | None, float, float | None]] = [
            ("longest pause of a stream, s", alone["pause"], beside["pause"], LAW_SECONDS),
            ("pause, 99 of 100, s", alone["pause p99"], beside["pause p99"], None),
            ("first token, s", alone["first token"], beside["first token"], None),
            ("`/health`, s", alone["health"], beside["health"], LAW_SECONDS),
            (f"event loop later than {LAW_SECONDS} s, times", None, late, 0),
            ("answers", alone["answers"], beside["answers"], None),
            ("wrong answers, statuses of 500", None, wrong, 0),
            ("memory kept afterwards, MiB", None, (self.after - self.before) >> 20, MOST_GROWTH >> 20),
            ("most memory, MiB", self.before >> 20, self.peak >> 20, None),
        ]
        rows += [
            (f"refusal of {kind}, s", None, seconds, REFUSAL_SECONDS + TRIED.get(kind, 0.0))
            for kind, seconds in sorted(self.attackers["slowest"].items())
        ]
        lines = ["| what | alone | beside attackers | may be | |", "|---|---|---|---|---|"]
        for what, before, found, most in rows:
            verdict = "" if most is None else "holds" if found <= most else "BROKEN"
            shown = ["" if value is None else f"{value:.3g}" for value in (before, found, most)]
            lines.append(f"| {what} | {' | '.join(shown)} | {verdict} |")
        return lines

    def under_way(self, began: float, ended: float) -> list[str]:
        """The attacks that were under way between two times of the monotonic clock."""
        return [what for begin, end, what in self.attackers.get("spans", ()) if begin < ended and end > began]

    def faults(self, *, absolute: bool) -> list[str]:
        """What breaks the law; `absolute` where the machine is quiet, else by what the clients noticed alone."""
        found = self.alone.wrong + self.beside.wrong + self.attackers["wrong"] + self.files["wrong"]
        alone, beside = self.alone.told(), self.beside.told()
        for what in ("pause", "health"):
            for share, (times, more) in {"": (0.0, LAW_SECONDS)}.items() if absolute else LOOSE.items():
                most, found_s = times * alone[what] + more, beside[f"{what}{share}"]
                if found_s > most:
                    found.append(f"the longest{share} {what} is {found_s:.2f} s, at most {most:.2f} may be")
        slowest = self.attackers["slowest"].items() if absolute else ()
        slow = {kind: seconds for kind, seconds in slowest if seconds > REFUSAL_SECONDS + TRIED.get(kind, 0.0)}
        found += [f"a refusal of {kind} took {seconds:.1f} s" for kind, seconds in slow.items()]
        bound = str(LAW_SECONDS if absolute else LOOP_SECONDS)
        if late := self.loop["+Inf"] - self.loop[bound]:
            found.append(f"the event loop was later than {bound} s {late} times")
        if not beside["answers"]:
            found.append("no answer came beside the attackers")
        if self.after - self.before > MOST_GROWTH:
            found.append(f"{(self.after - self.before) >> 20} MiB are kept after the attacks")
        return found


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


async def attack(folder: Path, seconds: float, seed: int = 0) -> Outcome:
    """A run: a quarter alone, half beside attackers, a quarter of attacks on files."""
    asked = questions(seed, 9)
    with tempfile.TemporaryDirectory() as root:
        options = [*SERVER, "--adapter-root", root]
        async with serving(folder, options) as (process, client):
            expected = [await _asked(client, question) for question in asked]
            alone, attacked = Noticed(), Noticed()
            url = str(client.base_url).rstrip("/")
            async with beside("scripts.attackers", url, str(seed), str(seconds / 2), root) as attackers:
                until = time.monotonic() + seconds / 4
                await _behave(client, asked, expected, alone, lambda: time.monotonic() > until)
                before, peak, loop = memory(process.pid), [0], await _delays(client)
                async with _watching(process.pid, peak):
                    over = attackers()
                    await _behave(client, asked, expected, attacked, over.done)
                    told = json.loads(await over)
            await asyncio.sleep(3.0)
            for question, answer in zip(asked, expected, strict=True):
                if await _asked(client, question) != answer:
                    attacked.wrong.append(f"after the attacks {question.path} answers otherwise")
            delays = {bound: count - loop[bound] for bound, count in (await _delays(client)).items()}
            after = memory(process.pid)
    async with beside("scripts.attack_files", str(seed), str(seconds / 4)) as files:
        files_told = json.loads(await files())
    return Outcome(
        alone=alone,
        beside=attacked,
        attackers=told,
        files=files_told,
        before=before,
        peak=peak[0],
        after=after,
        loop=delays,
    )


async def _delays(client: httpx.AsyncClient) -> dict[str, int]:
    """How often the event loop was late by at most so many seconds."""
    text = (await client.get("/metrics")).text
    found = re.findall(r'^spyglass:event_loop_delay_seconds_bucket{le="(.*)"} (.*)$', text, re.MULTILINE)
    return {bound: int(float(count)) for bound, count in found}


async def _asked(client: httpx.AsyncClient, question: Question) -> str:
    answer = await client.post(question.path, json={**question.body, "stream": False})
    assert answer.status_code == 200, answer.text
    return question.read(read(answer.text, stream=False))


async def _behave(
    client: httpx.AsyncClient,
    asked: Sequence[Question],
    expected: Sequence[str],
    noticed: Noticed,
    over: Callable[[], bool],
) -> None:
    """Three clients: one reads streams, one whole answers, one asks for the server's health."""

    async def streams() -> None:
        number, streamed = 0, [number for number, question in enumerate(asked) if question.streams]
        while not over():
            number += 1
            which = streamed[number % len(streamed)]
            await _stream(client, asked[which], expected[which], noticed)

    async def wholes() -> None:
        number = 0
        while not over():
            number = (number + 4) % len(asked)
            answer = await client.post(asked[number].path, json={**asked[number].body, "stream": False})
            _note(noticed, asked[number], expected[number], answer.status_code, answer.text, stream=False)

    async def health() -> None:
        while not over():
            began = time.monotonic()
            answer = await client.get("/health")
            noticed.health.append(time.monotonic() - began)
            if answer.status_code != 200:
                noticed.wrong.append(f"/health: {answer.status_code} {answer.text[:200]}")
            await asyncio.sleep(0.05)

    await asyncio.gather(streams(), wholes(), health())


async def _stream(client: httpx.AsyncClient, question: Question, expected: str, noticed: Noticed) -> None:
    began = last = time.monotonic()
    pieces: list[str] = []
    speaks = False  # opening events come before the prompt has run
    async with client.stream("POST", question.path, json={**question.body, "stream": True}) as answer:
        async for piece in answer.aiter_text():
            now = time.monotonic()
            pieces.append(piece)
            if speaks:
                noticed.paused(now - last, now, question)
            elif speaks := bool(question.read(read("".join(pieces).rpartition("\n\n")[0], stream=True))):
                noticed.firsts.append(now - began)
            last = now
    _note(noticed, question, expected, answer.status_code, "".join(pieces), stream=True)


def _note(noticed: Noticed, question: Question, expected: str, status: int, text: str, *, stream: bool) -> None:
    if status == 429:  # the attackers have all places; keys with shares are against that
        return
    noticed.answers += 1
    if status != 200 or question.read(read(text, stream=stream)) != expected:
        noticed.wrong.append(f"{question.path} {str(question.body)[:200]}: {status} {text[:300]}")


@asynccontextmanager
async def _watching(pid: int, peak: list[int]) -> AsyncIterator[None]:
    async def watch() -> None:
        while True:
            peak[0] = max(peak[0], memory(pid))
            await asyncio.sleep(0.1)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


def main() -> int:
    """The long form, by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--relative", action="store_true", help="judge by what clients notice without attackers")
    args = parser.parse_args()
    print("processors:", os.cpu_count(), "load of the machine before:", os.getloadavg())
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "tiny"
        new_checkpoint(folder, "tiny", seed=0)
        outcome = asyncio.run(attack(folder, args.seconds, args.seed))
    for what, counts in (("server", outcome.attackers), ("files", outcome.files)):
        print(f"{what}: {sum(counts['seen'].values())} attacks", dict(sorted(counts["seen"].items())))
    print("files, slowest refusal, s:", {kind: round(seconds, 2) for kind, seconds in outcome.files["slowest"].items()})
    print("delays of the event loop, by bound in seconds:", outcome.loop)
    print(
        "slowest refusals:",
        *(f"  {outcome.attackers['which'][kind]}" for kind in outcome.attackers["slowest"]),
        sep="\n",
    )
    for seconds, ended, what in outcome.beside.longest:
        print(
            f"a pause of {seconds:.3f} s in {what}, while there were",
            *outcome.under_way(ended - seconds, ended),
            sep="\n  ",
        )
    print(*outcome.table(), sep="\n")
    print("load of the machine after:", os.getloadavg())
    faults = outcome.faults(absolute=not args.relative)
    for fault in faults[:30]:
        print("WRONG", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
