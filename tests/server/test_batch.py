"""Offline batches: every line gets exactly one answer, the one it would get alone, however often the run is cut."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.request import SamplingParams, Structured
from spyglass.engine.structured.grammar import GrammarCompiler, GrammarMatcher
from spyglass.errors import PromptError
from spyglass.lora.write import write_adapter
from spyglass.server.app import served_by
from spyglass.server.batch import BatchLine, answered, batch_lines, check_batch, run_batch
from spyglass.server.protocols.endpoints import make_endpoints
from tests.adapter_parts import random_adapter, shapes_of
from tests.server.parts import PlainEndpoint, plain


def line(number: int, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"q{number}", "method": "POST", "url": "/plain", "body": body}


def written(path: Path, *lines: object) -> Path:
    texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def run(llm: LLM, path: Path, skip: Collection[str] = ()) -> tuple[list[dict[str, Any]], tuple[int, int]]:
    endpoint, out, notes = plain(llm), io.StringIO(), []
    assert check_batch(path, [endpoint.path])[1] == ""
    lines = (line for line in batch_lines(path, [endpoint.path]) if line.custom_id not in skip)
    counts = run_batch(llm, [endpoint], lines, out, notes.append)
    assert (sum(notes), len(notes) - sum(notes)) == counts
    return [json.loads(text) for text in out.getvalue().splitlines()], counts


def test_every_line_has_the_answer_it_has_alone(llm: LLM, tmp_path: Path) -> None:
    questions = [[0, 5, 6 + n] for n in range(30)]
    path = written(
        tmp_path / "in.jsonl", *(line(n, ids=ids, max_tokens=3, n=1 + n % 2) for n, ids in enumerate(questions))
    )
    answers, counts = run(llm, path)
    assert counts == (30, 0) and {a["custom_id"] for a in answers} == {f"q{n}" for n in range(30)}
    for answer in answers:
        number = int(answer["custom_id"][1:])
        alone = llm.generate([questions[number]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0]
        assert answer["response"]["status_code"] == 200 and answer["error"] is None
        assert answer["response"]["body"]["answers"] == [list(alone.token_ids)] * (1 + number % 2)
    assert not llm.engine.has_work


def test_forms_are_compiled_while_lines_are_read_and_not_between_steps(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    begin = GrammarCompiler.begin

    def told(forms: GrammarCompiler, structured: Structured) -> GrammarMatcher:
        threads.append(threading.current_thread().name)
        return begin(forms, structured)

    monkeypatch.setattr(GrammarCompiler, "begin", told)
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    lines = [{**line(n, **asked, guided_regex=f"{n}[ab]"), "url": "/v1/chat/completions"} for n in range(3)]
    lines.append({**line(3, **asked, guided_regex="("), "url": "/v1/chat/completions"})
    endpoints = make_endpoints(served_by(llm, ServerConfig()))
    out, path = io.StringIO(), written(tmp_path / "in.jsonl", *lines)
    urls = [endpoint.path for endpoint in endpoints]
    assert run_batch(llm, endpoints, batch_lines(path, urls), out, lambda fine: None) == (3, 1)
    replies = {
        answer["custom_id"]: answer["response"]["body"] for answer in map(json.loads, out.getvalue().splitlines())
    }
    for number in range(3):
        text = replies[f"q{number}"]["choices"][0]["message"]["content"]
        assert text in (f"{number}a", f"{number}b")
    assert "the regex asked for" in replies["q3"]["error"]["message"]
    assert len(threads) == 4 and all(name.startswith("parse") for name in threads)


def test_a_line_is_answered_with_the_adapter_that_its_model_names(tiny_folder: Path, tmp_path: Path) -> None:
    llm = LLM(tiny_folder, device="cpu", dtype="float32", numerics="plain")
    write_adapter(tmp_path / "a", random_adapter(shapes_of(llm.loaded.model), ["attention"], rank=4, size=1.0))
    llm.add_adapter("mine", tmp_path / "a")
    asked = {"ids": [0, 5, 6], "max_tokens": 6}
    answers, counts = run(llm, written(tmp_path / "in.jsonl", line(0, **asked), line(1, model="mine", **asked)))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    found = {a["custom_id"]: a["response"]["body"]["answers"] for a in answers}
    for name, adapter in (("q0", None), ("q1", "mine")):
        assert found[name] == [list(llm.generate([[0, 5, 6]], params, adapter=adapter)[0].token_ids)]
    assert found["q0"] != found["q1"] and counts == (2, 0)


def test_a_line_that_cannot_be_honoured_is_answered_with_its_reason_and_others_go_on(llm: LLM, tmp_path: Path) -> None:
    most = llm.engine.max_length
    path = written(
        tmp_path / "in.jsonl",
        line(0, max_tokens=2),
        line(1, ids="no"),
        line(2, ids=[1] * (most + 1)),
        line(3, stream=True),
        line(4, count=True),
        line(5, model="another"),
        line(6, max_tokens=2),
    )
    answers, counts = run(llm, path)
    status = {a["custom_id"]: a["response"]["status_code"] for a in answers}
    assert status == {"q0": 200, "q1": 400, "q2": 400, "q3": 400, "q4": 200, "q5": 404, "q6": 200}
    assert counts == (3, 4)
    assert all(a["response"]["body"]["plain_error"]["message"] for a in answers if status[a["custom_id"]] >= 400)
    found = answered(written(tmp_path / "out.jsonl", *answers))
    assert found == {name: code == 200 for name, code in status.items()}, "a refusal stays one when it is met again"


def test_a_cut_run_goes_on_where_it_was_and_half_a_line_is_done_again(llm: LLM, tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", *(line(n, ids=[0, n], max_tokens=2) for n in range(6)))
    whole, _ = run(llm, path)
    out = tmp_path / "out.jsonl"
    texts = [json.dumps(answer) for answer in whole]
    out.write_text(texts[0] + "\n" + texts[1] + "\n" + texts[2][:20], encoding="utf-8")
    done = answered(out)
    assert done == {whole[0]["custom_id"]: True, whole[1]["custom_id"]: True}
    assert out.read_text(encoding="utf-8") == texts[0] + "\n" + texts[1] + "\n"
    rest, counts = run(llm, path, done)
    assert counts == (4, 0)
    bodies = {a["custom_id"]: a["response"]["body"]["answers"] for a in whole}
    assert {a["custom_id"]: a["response"]["body"]["answers"] for a in rest} == {
        k: bodies[k] for k in bodies if k not in done
    }
    assert answered(tmp_path / "absent.jsonl") == {}


def test_faulty_lines_are_listed_and_the_others_answered(tmp_path: Path) -> None:
    path = written(
        tmp_path / "in.jsonl",
        line(1),
        "{broken",
        [1],
        {**line(2), "url": "/v1/embeddings"},
        {**line(3), "extra": 1},
        {**line(4), "body": "x"},
        line(1),
        {**line(5), "custom_id": ""},
        {**line(6), "method": "GET"},
        '{"custom_id": "\\ud800", "url": "/plain", "body": {}}',
        '{"custom_id": "nan", "url": "/plain", "body": {"temperature": NaN}}',
        '{"custom_id": "deep", "url": "/plain", "body": ' + '{"a": ' * 3000 + "1" + "}" * 3001,
    )
    count, faults = check_batch(path, ["/plain"])
    for number in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12):
        assert f"line {number}:" in faults
    assert "line 1:" not in faults and count == 1
    assert [found.number for found in batch_lines(path, ["/plain"])] == [1]
    with pytest.raises(PromptError, match="line 1:"):
        check_batch(written(tmp_path / "bad.jsonl", "{broken"), ["/plain"])
    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().splitlines(keepends=True)[0])
    assert check_batch(marked, ["/plain"]) == (1, "")
    with pytest.raises(PromptError, match="no requests"):
        check_batch(written(tmp_path / "empty.jsonl", ""), ["/plain"])
    with pytest.raises(PromptError, match="cannot be read"):
        check_batch(tmp_path / "absent.jsonl", ["/plain"])
    (tmp_path / "other.txt").write_text("my notes\n", encoding="utf-8")
    with pytest.raises(PromptError, match="no answer of a batch"):
        answered(tmp_path / "other.txt")


def test_a_failing_step_costs_its_own_requests_only(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "in.jsonl", *(line(n, ids=[0, n], max_tokens=4) for n in range(40)))
    real, calls = llm.engine.runner.run, []

    def fails_once(chunks: Any, *more: Any) -> Any:
        calls.append([chunk.sequence.request_id for chunk in chunks])
        if len(calls) == 3:
            raise RuntimeError("made to fail")
        return real(chunks, *more)

    monkeypatch.setattr(llm.engine.runner, "run", fails_once)
    answers, (good, bad) = run(llm, path)
    assert len({a["custom_id"] for a in answers}) == 40 and good + bad == 40
    assert bad <= len(calls[2]) and good >= 40 - len(calls[2])
    for answer in answers:
        body = answer["response"]["body"]
        assert (answer["response"]["status_code"] == 500) == bool(body["errors"])


def test_a_fault_of_ours_in_one_line_is_that_lines_answer(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = PlainEndpoint.parse

    def broken(self: PlainEndpoint, body: Any, fetch: Any) -> Any:
        if body["max_tokens"] == 2:
            raise TypeError("unhashable")
        return parse(self, body, fetch)

    monkeypatch.setattr(PlainEndpoint, "parse", broken)
    found, counts = run(llm, written(tmp_path / "in.jsonl", *(line(n, max_tokens=n) for n in (1, 2, 3))))
    assert counts == (2, 1) and not llm.engine.has_work
    status = {answer["custom_id"]: answer["response"]["status_code"] for answer in found}
    assert status == {"q1": 200, "q2": 500, "q3": 200} and "unhashable" not in json.dumps(found)


def test_a_line_that_is_refused_half_way_leaves_nothing_running(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = llm.engine.submit, []

    def refuses_the_second(*call: Any, **more: Any) -> int:
        calls.append(call)
        if len(calls) == 2:
            raise PromptError("no more")
        return submit(*call, **more)

    monkeypatch.setattr(llm.engine, "submit", refuses_the_second)
    (answer,), counts = run(llm, written(tmp_path / "in.jsonl", line(0, n=2, max_tokens=50)))
    assert counts == (0, 1) and answer["response"]["status_code"] == 400
    assert not llm.engine.has_work


def test_a_file_is_read_no_faster_than_it_is_answered(llm: LLM, tmp_path: Path) -> None:
    path = written(tmp_path / "in.jsonl", *(line(n, ids=[0, n], max_tokens=1) for n in range(60)))
    taken: list[str] = []
    ahead: list[int] = []

    def lines() -> Iterator[BatchLine]:
        for each in batch_lines(path, ["/plain"]):
            taken.append(each.custom_id)
            yield each

    run_batch(llm, [plain(llm)], lines(), io.StringIO(), lambda _: ahead.append(len(taken) - len(ahead)))
    assert len(ahead) == 60 and max(ahead) <= 2 * llm.options.max_sequences
