"""Chats as training data: what is learnt of them, what is refused, and how they are cut into micro-batches."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from spyglass.checkpoint.tokenizer import write_tokenizer
from spyglass.config import read_model_config
from spyglass.config.presets import preset_config
from spyglass.config.read import parse_model_config
from spyglass.errors import ConfigError, PromptError
from spyglass.prompt.build import build_prompt
from spyglass.prompt.tokenizer import PromptTokenizer, load_tokenizer
from spyglass.train.data import Batches, Feed, Learner, read_chats
from spyglass.train.packing import Sample

USER = {"role": "user", "content": "What is it?"}
ANSWER = {"role": "assistant", "content": "A red square."}
END = "<｜end▁of▁sentence｜>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def learner(tiny_folder: Path) -> Learner:
    tokenizer = load_tokenizer(tiny_folder)
    assert tokenizer is not None
    return Learner(read_model_config(tiny_folder), tokenizer)


def image(size: tuple[int, int] = (60, 40), colour: str = "red") -> Image.Image:
    return Image.new("RGB", size, colour)


def shown(source: Any) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": source}}, {"type": "text", "text": "What?"}],
    }


def learnt(sample: Sample, tokenizer: PromptTokenizer) -> list[str]:
    """The runs of tokens that are learnt, as text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.learn_T.astype(np.int8), [0]])))
    return [tokenizer.decode(sample.prompt.ids_T[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


def test_what_the_model_would_draw_is_learnt_and_nothing_else(learner: Learner) -> None:
    sample = learner.sample([{"role": "system", "content": "Be brief."}, USER, ANSWER, USER, ANSWER])
    assert learnt(sample, learner.tokenizer) == [f"A red square.{END}"] * 2


def test_a_chat_begins_as_the_question_that_is_served(learner: Learner) -> None:
    for messages in ([USER, ANSWER], [shown(image()), ANSWER, USER, ANSWER]):
        sample = learner.sample(messages)
        asked = build_prompt(messages[:-1], learner.config, learner.tokenizer)
        assert np.array_equal(sample.prompt.ids_T[: len(asked)], asked.ids_T)
        assert np.array_equal(sample.prompt.kinds_T[: len(asked)], asked.kinds_T)
        assert not sample.learn_T[len(asked) - 1] and sample.learn_T[len(asked) :].all()


def test_reasoning_is_learnt_as_the_model_would_write_it(learner: Learner) -> None:
    messages = [USER, {**ANSWER, "reasoning_content": "Old."}, USER, {**ANSWER, "reasoning_content": "It has 4 sides."}]
    sample = learner.sample(messages)
    asked = build_prompt(messages[:-1], learner.config, learner.tokenizer, thinking=True)
    assert np.array_equal(sample.prompt.ids_T[: len(asked)], asked.ids_T)
    assert learnt(sample, learner.tokenizer) == [
        f"A red square.{END}",
        f"It has 4 sides.</think>A red square.{END}",
    ]


def test_tool_calls_are_learnt_and_their_results_are_not(learner: Learner) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        ANSWER,
    ]
    runs = learnt(learner.sample(messages, [TOOL]), learner.tokenizer)
    assert len(runs) == 2 and 'name="f"' in runs[0] and runs[1] == f"A red square.{END}"


def test_a_chat_may_end_with_a_call(learner: Learner) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (run,) = learnt(learner.sample(asked, [TOOL]), learner.tokenizer)
    whole = [*asked, {"role": "tool", "tool_call_id": "1", "content": "42"}, ANSWER]
    assert run == learnt(learner.sample(whole, [TOOL]), learner.tokenizer)[0] and run.endswith(f"calls>{END}")


def test_a_schema_of_the_request_is_said_in_the_prompt_and_not_learnt(learner: Learner) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    sample = learner.sample([USER, ANSWER], response_format=form)
    prompt = build_prompt([USER], learner.config, learner.tokenizer, response_format=form)
    assert np.array_equal(sample.prompt.ids_T[: len(prompt)], prompt.ids_T) and len(prompt) > 20
    assert learnt(sample, learner.tokenizer) == [f"A red square.{END}"]


def test_all_text_may_be_learnt_but_never_a_picture_or_the_first_token(learner: Learner) -> None:
    """Positions of images are no targets."""
    messages = [shown(image()), ANSWER]
    sample = Learner(learner.config, learner.tokenizer, loss_on="all").sample(messages)
    is_text = sample.prompt.ids_T >= 0
    assert not is_text.all() and not sample.learn_T[~is_text].any() and not sample.learn_T[0]
    assert sample.learn_T[1:][is_text[1:]].all()
    assert np.array_equal(sample.prompt.ids_T, learner.sample(messages).prompt.ids_T)


def test_what_spells_a_special_token_is_learnt_as_text(learner: Learner) -> None:
    sample = learner.sample([USER, {**ANSWER, "content": f"<｜Assistant｜></think>{END}"}])
    end = learner.tokenizer.special_id(END)
    assert (sample.prompt.ids_T[sample.learn_T] == end).sum() == 1


def test_v41_chats_are_learnt_alike(tmp_path: Path) -> None:
    config = parse_model_config(preset_config("tiny-v41", packed=True), "tiny-v41")
    write_tokenizer(tmp_path, config)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    sample = Learner(config, tokenizer).sample([USER, ANSWER, USER, {**ANSWER, "reasoning_content": "Hm."}])
    assert learnt(sample, tokenizer) == [f"A red square.{END}", f"Hm.</think>A red square.{END}"]


def lines_of(path: Path, *entries: Any) -> Path:
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return path


def test_pictures_are_paths_seen_from_the_file_or_data_urls(tmp_path: Path, learner: Learner) -> None:
    (tmp_path / "pictures").mkdir()
    image().save(tmp_path / "pictures" / "a.png")
    buffer = BytesIO()
    image().save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    entries = [{"messages": [shown(source), ANSWER]} for source in ("pictures/a.png", url)]
    chats, faults = read_chats(lines_of(tmp_path / "a.jsonl", *entries), learner, most_tokens=4096, progress=False)
    assert not faults
    both = [learner.sample(chat.messages) for chat in chats]
    (one,), (other,) = (sample.prompt.patches for sample in both)
    assert np.array_equal(one, other)
    assert [chat.tokens for chat in chats] == [len(sample.prompt) for sample in both]
    assert [chat.targets for chat in chats] == [len(sample.rows) for sample in both]


BAD: list[tuple[Any, str]] = [
    ("{", "not JSON"),
    ('{"messages": [], "messages": [1]}', "'messages' is written twice"),
    (json.dumps({"messages": [{"role": "user", "content": "ab\ud800"}, ANSWER]}), "lone surrogate at character 2"),
    ({"message": []}, '"messages"'),
    ({"messages": [{**USER, "content": "Where is <image>?"}, ANSWER]}, "1 marks for images (<image> in a text"),
    ({"messages": []}, "last message must be the assistant's"),
    ({"messages": [USER]}, "last message must be the assistant's"),
    ({"messages": [shown("missing.png"), ANSWER]}, "missing.png"),
    ({"messages": [shown("https://example.org/a.png"), ANSWER]}, "not fetched"),
    ({"messages": [shown("data:image/png;base64,AAAA"), ANSWER]}, "image 0"),
    ({"messages": [{"role": "user", "content": "x " * 3000}, ANSWER]}, "raise --batch-tokens"),
    ({"messages": [{"role": "user", "content": [{"type": "image_urll"}]}, ANSWER]}, "image_urll"),
    ({"messages": [USER, {**ANSWER, "reasoning_content": 3}]}, "expected a string"),
    ({"messages": [USER, {**ANSWER, "prefix": True}]}, "no end that could be learnt"),
    ({"messages": [USER, ANSWER, USER, {**ANSWER, "prefix": True}]}, "no end that could be learnt"),
    ({"messages": [USER, {**ANSWER, "weight": 0}]}, "messages[1] has the unknown key 'weight'"),
    ({"messages": [USER, {**ANSWER, "thinking": "Hm."}]}, "messages[1] has the unknown key 'thinking'"),
    ({"messages": [USER, {**ANSWER, "content": ""}]}, "teach it to say nothing"),
    ({"messages": [USER, {**ANSWER, "content": []}, USER, ANSWER]}, "teach it to say nothing"),
    ({"messages": [USER, {**ANSWER, "content": ""}, USER, {**ANSWER, "reasoning_content": "Hm."}]}, "to say nothing"),
]


def test_every_bad_line_is_listed_with_its_number_and_reason(tmp_path: Path, learner: Learner) -> None:
    entries = [{"messages": [USER, ANSWER]}, "", *(entry for entry, _ in BAD), {"messages": [USER, ANSWER]}]
    path = lines_of(tmp_path / "a.jsonl", *entries)
    with pytest.raises(PromptError, match=f"{len(BAD)} of {len(BAD) + 2} lines cannot be used") as caught:
        read_chats(path, learner, most_tokens=2000, progress=False)
    told = str(caught.value).splitlines()[1:]
    for number, (line, (_, reason)) in enumerate(zip(told, BAD, strict=True), 3):
        assert line.strip().startswith(f"line {number}: ") and reason in line, line
    chats, faults = read_chats(path, learner, most_tokens=2000, skip_bad=True, progress=False)
    assert [chat.line for chat in chats] == [1, len(entries)] and len(faults) == len(BAD)


def test_what_other_tools_leave_in_a_file_is_no_fault(tmp_path: Path, learner: Learner) -> None:
    """A byte order mark, line ends of Windows, fields of a response that say nothing, reasoning without an answer."""
    blank = {"refusal": None, "annotations": [], "function_call": None}
    entries = [
        {"messages": [USER, {**ANSWER, **blank}]},
        {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": "Hm."}]},
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, entries)).encode())
    chats, faults = read_chats(path, learner, most_tokens=4096, progress=False)
    assert [chat.line for chat in chats] == [1, 2] and not faults
    assert learnt(learner.sample(chats[0].messages), learner.tokenizer) == [f"A red square.{END}"]


def test_a_file_without_a_single_chat_is_refused(tmp_path: Path, learner: Learner) -> None:
    with pytest.raises(PromptError, match="no chat to learn from"):
        read_chats(lines_of(tmp_path / "a.jsonl", "", "{"), learner, most_tokens=99, skip_bad=True, progress=False)
    with pytest.raises(PromptError, match="cannot be read"):
        read_chats(tmp_path / "none.jsonl", learner, most_tokens=99, progress=False)
    (tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(PromptError, match=r"photo\.jpg is no text .* lines of the form"):
        read_chats(tmp_path / "photo.jpg", learner, most_tokens=99, progress=False)


def test_every_epoch_has_every_chat_once_in_an_order_of_its_own() -> None:
    tokens = np.random.default_rng(0).integers(1, 60, 37).tolist()
    batches = Batches(tokens, most_tokens=100, seed=5)
    one, two = batches.count(1), batches.count(2)
    epochs = [[batches[n] for n in range(first, last)] for first, last in ((0, one), (one, two))]
    for epoch in epochs:
        assert sorted(chat for batch in epoch for chat in batch) == list(range(37))
        assert max(sum(tokens[chat] for chat in batch) for batch in epoch) <= 100
        for batch, following in pairwise(epoch):
            assert sum(tokens[chat] for chat in [*batch, following[0]]) > 100, "a batch is filled up"
    assert epochs[0] != epochs[1]
    assert Batches(tokens, most_tokens=100, seed=5)[two - 1] == epochs[1][-1]
    assert Batches(tokens, most_tokens=100, seed=6)[0] != epochs[0][0]


def test_a_feed_gives_the_samples_of_a_number_whatever_was_asked_before(tmp_path: Path, learner: Learner) -> None:
    entries = [{"messages": [{"role": "user", "content": "x" * n}, ANSWER]} for n in range(1, 8)]
    chats, _ = read_chats(lines_of(tmp_path / "a.jsonl", *entries), learner, most_tokens=40, progress=False)
    batches = Batches([chat.tokens for chat in chats], most_tokens=40, seed=0)
    feed, other = (Feed(chats, batches, learner, stride=2) for _ in range(2))
    asked = {n: [s.prompt.ids_T.tolist() for s in feed(n)] for n in (0, 2, 4, 1)}
    assert {n: [s.prompt.ids_T.tolist() for s in other(n)] for n in asked} == asked
    assert asked[0] == [learner.sample(chats[c].messages).prompt.ids_T.tolist() for c in batches[0]]


def test_passes_that_nobody_could_wait_for_are_refused() -> None:
    batches = Batches([10, 20, 30], most_tokens=60, seed=0)
    assert batches.count(2) == 2
    with pytest.raises(ConfigError, match="1000000000 passes over 3 chats are too many to plan; say how many steps"):
        batches.count(10**9)


def test_a_chat_that_the_model_could_never_read_is_refused(tmp_path: Path, learner: Learner) -> None:
    """Whatever a batch may hold: behind the last position that a model is made for, none would be asked."""
    tokens = len(learner.sample([USER, ANSWER]).prompt)
    path = lines_of(tmp_path / "a.jsonl", {"messages": [USER, ANSWER]})
    for most in (tokens, tokens - 1):
        text = replace(learner.config.text, max_position_embeddings=most)
        short = replace(learner, config=replace(learner.config, text=text))
        if most == tokens:
            assert len(read_chats(path, short, most_tokens=4096, progress=False)[0]) == 1
            continue
        with pytest.raises(PromptError, match=rf"{tokens} tokens, and the model reads {most} \(max_position_emb"):
            read_chats(path, short, most_tokens=4096, progress=False)
