"""Offline work in the form of OpenAI's batches: lines of requests in, lines of answers out, no HTTP.

The protocols are those of the server, so a line means what the same request would. Answers come in the order in which
they are ready; a second run over the same files goes on with the lines that have none.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from spyglass.engine.llm import LLM
from spyglass.errors import PromptError
from spyglass.server.body import parse_json
from spyglass.server.errors import error_body, error_response
from spyglass.server.exchange import Call, Endpoint, Immediate
from spyglass.server.parsing import prepared

_REFUSED = 400  # and more, of a status
_PARSERS = 2  # threads that decode images ahead of the engine
_FORM = "a request is an object with custom_id, method, url and body"
_SHOWN = 20  # faulty lines listed in an error
_LONGEST_LINE = 64 << 20  # characters; a request may carry images


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request: `number` counts lines of the file from 1."""

    number: int
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(slots=True)
class _Open:
    """A request whose answers are under way."""

    line: BatchLine
    call: Call
    request_id: str
    missing: int


def check_batch(path: Path, urls: Sequence[str]) -> tuple[int, str]:
    """How many requests a file has, and what is wrong with its other lines, in words; empty if nothing is.

    Raises:
        PromptError: the file cannot be read, or no line of it is a request.
    """
    count, faults = 0, list[str]()
    for found in _requests(path, urls):
        if isinstance(found, str):
            faults.append(found)
        else:
            count += 1
    more = f"\n... and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    words = f"{path} has faulty lines ({len(faults)}):\n" + "\n".join(faults[:_SHOWN]) + more if faults else ""
    if not count:
        raise PromptError(words or f"{path} has no requests; each line is one, as JSON")
    return count, words


def batch_lines(path: Path, urls: Sequence[str]) -> Iterator[BatchLine]:
    """The requests of a file, one by one: a file of any size takes little memory. Faulty lines are left out."""
    return (found for found in _requests(path, urls) if isinstance(found, BatchLine))


def answered(path: Path) -> dict[str, bool]:
    """Ids that have an answer in an output file, and whether it is more than a refusal; an unfinished last line, left
    by an interruption, is cut off.

    Raises:
        PromptError: the file holds something else than answers of a batch.
    """
    if not path.is_file():  # not there yet, or a device
        return {}
    done, end = dict[str, bool](), 0
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                break
            end += len(text)
            try:
                answer = json.loads(text)
                done[answer["custom_id"]] = answer["response"]["status_code"] < _REFUSED
            except (ValueError, TypeError, LookupError) as error:
                raise PromptError(f"{path} line {number} is no answer of a batch; give another --output") from error
    if end < path.stat().st_size:
        os.truncate(path, end)
    return done


def run_batch(
    llm: LLM, endpoints: Sequence[Endpoint], lines: Iterator[BatchLine], out: IO[str], note: Callable[[bool], None]
) -> tuple[int, int]:
    """Answer every line; `note` hears of each whether it went well. Returns how many did, and how many did not."""
    batch = _Batch(llm, {endpoint.path: endpoint for endpoint in endpoints}, out, note)
    with ThreadPoolExecutor(_PARSERS, thread_name_prefix="parse") as pool:
        ahead: list[tuple[BatchLine, Future[Call | Immediate]]] = []
        most = 2 * llm.options.max_sequences
        while True:
            while len(ahead) + len(batch.open) < most and (line := next(lines, None)) is not None:
                ahead.append((line, pool.submit(batch.parse, line)))
            while ahead and (ahead[0][1].done() or not batch.open):
                batch.begin(*ahead.pop(0))
            if not ahead and not batch.open:
                return batch.good, batch.bad
            batch.step()


class _Batch:
    """Requests under way, by the engine's numbers of their answers."""

    def __init__(self, llm: LLM, endpoints: Mapping[str, Endpoint], out: IO[str], note: Callable[[bool], None]) -> None:
        self._engine, self._endpoints, self._out, self._note = llm.engine, endpoints, out, note
        self._adapter_use = llm.adapter_use
        self.open: dict[int, tuple[_Open, int]] = {}
        self.good = self.bad = 0

    def parse(self, line: BatchLine) -> Call | Immediate:
        if line.body.get("stream"):
            raise PromptError("stream has no meaning in a batch; leave it out")
        call = self._endpoints[line.url].parse(line.body, None)
        return prepared(call, self._engine.prepare) if isinstance(call, Call) else call

    def begin(self, line: BatchLine, parsed: Future[Call | Immediate]) -> None:
        """Queue the answers of a request, or write why there are none."""
        request_id = f"batch_req_{uuid4().hex}"
        numbers: list[int] = []
        try:
            call = parsed.result()
            if isinstance(call, Immediate):
                self._write(line, request_id, call.status, call.body, call.ignored)
                return
            open_call = _Open(line, call, request_id, len(call.params))
            adapter = self._adapter_use(call.adapter)
            for index, request in enumerate(call.requests):
                numbers.append(self._engine.submit(request, adapter=adapter))
                self.open[numbers[-1]] = (open_call, index)
        except Exception as error:  # the top frame here, too: a fault of ours in one line is that line's answer
            for number in numbers:
                self.open.pop(number)
                self._engine.abort(number)
            response = error_response(error)
            if not response.known:
                traceback.print_exc()
            self._write(line, request_id, response.status, error_body(self._endpoints[line.url], response))

    def step(self) -> None:
        """One step of the engine; a failing one ends its requests, and the next call brings their last words."""
        try:
            deltas = self._engine.step()
        except Exception:  # the top frame: whatever broke in a step concerns its requests only
            traceback.print_exc()
            return
        for delta in deltas:
            if delta.request_id not in self.open:
                continue
            open_call, index = self.open[delta.request_id]
            open_call.call.reply.push(index, delta)
            if delta.output is None:
                continue
            del self.open[delta.request_id]
            open_call.missing -= 1
            if not open_call.missing:
                status, body = open_call.call.reply.whole(open_call.request_id)
                self._write(open_call.line, open_call.request_id, status, body, open_call.call.ignored)

    def _write(
        self, line: BatchLine, request_id: str, status: int, body: Mapping[str, Any], ignored: Sequence[str] = ()
    ) -> None:
        response = {"status_code": status, "request_id": request_id, "body": body}
        if ignored:  # places of the request without effect
            response["ignored"] = list(ignored)
        answer = {"id": request_id, "custom_id": line.custom_id, "response": response, "error": None}
        self._out.write(json.dumps(answer, ensure_ascii=False) + "\n")
        self._out.flush()
        fine = status < _REFUSED
        self.good, self.bad = self.good + fine, self.bad + (not fine)
        self._note(fine)


def _requests(path: Path, urls: Sequence[str]) -> Iterator[BatchLine | str]:
    """The request of each line, or what is wrong with it."""
    seen = set[str]()
    for number, text in _lines(path):
        found = _line(number, text, urls)
        if isinstance(found, BatchLine) and found.custom_id in seen:
            found = f"line {number}: custom_id {found.custom_id!r} stands on an earlier line too"
        if isinstance(found, BatchLine):
            seen.add(found.custom_id)
        yield found


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} cannot be read: {error}") from error


def _line(number: int, text: str, urls: Sequence[str]) -> BatchLine | str:
    """The request of a line, or what is wrong with it."""
    if len(text) > _LONGEST_LINE:
        return f"line {number}: {len(text):,} characters, more than {_LONGEST_LINE:,}"
    try:
        value = parse_json(text.encode(), f"line {number}: the request")
    except PromptError as error:
        return f"{error}; {_FORM}"
    if unknown := sorted(set(value) - {"custom_id", "method", "url", "body"}):
        return f"line {number}: unknown fields {', '.join(unknown)}; {_FORM}"
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return f"line {number}: custom_id must be a text that tells the answers apart"
    if value.get("method", "POST") != "POST" or not isinstance(url, str) or url not in urls:
        return f"line {number}: method is POST and url one of {', '.join(urls)}, not {value.get('method')} {url!r}"
    if not isinstance(body, dict):
        return f"line {number}: body must be an object"
    return BatchLine(number, custom_id, url, body)
