"""Questions as people put them to a server: true of their pictures, kept apart by split, rendered as a server does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spyglass.cli.main import main
from spyglass.config.model import ModelConfig
from spyglass.config.read import read_model_config
from spyglass.config.shipped import find_model
from spyglass.engine.request import SamplingParams
from spyglass.errors import ConfigError
from spyglass.prompt.answers import read_calls, read_json
from spyglass.prompt.build import build_prompt
from spyglass.prompt.tokenizer import PromptTokenizer, load_tokenizer
from spyglass.prompt.tokens import Prompt
from spyglass.tiny_world import sayings
from spyglass.tiny_world.cases import SPLITS, Case, Split
from spyglass.tiny_world.evaluate import evaluate
from spyglass.tiny_world.forms import PLACES
from spyglass.tiny_world.uses import USES, make_any, use_kinds_of
from spyglass.tiny_world.words import COLOURS, SHAPES, UNSEEN
from spyglass.train.data import Learner

Model = tuple[ModelConfig, PromptTokenizer]
END = "<｜end▁of▁sentence｜>"


@pytest.fixture(scope="module", params=["spyglass-tiny-v4", "spyglass-tiny-v41"])
def model(request: pytest.FixtureRequest) -> Model:
    folder = find_model(request.param)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return read_model_config(folder), tokenizer


def some(kind: str, count: int, split: Split = "test", seed: int = 1) -> list[Case]:
    return [make_any(seed, index, split, kinds=(kind,)) for index in range(count)]


def content(case: Case) -> list[tuple[Any, bytes]]:
    return [(case.words, image.tobytes()) for image in case.images] or [(case.words, b"")]


def parts_of(messages: Any) -> list[Any]:
    return [part for message in messages if isinstance(message["content"], list) for part in message["content"]]


@pytest.mark.parametrize("kind", USES)
def test_a_case_is_a_function_of_seed_index_and_split_and_shows_its_pictures_once(kind: str) -> None:
    first, again = some(kind, 6), some(kind, 6)
    assert [content(case) for case in first] == [content(case) for case in again]
    assert (
        len({repr(content(case)) for split in SPLITS if kind in use_kinds_of(split) for case in some(kind, 2, split)})
        > 3
    )
    for case in first:
        parts = [
            part for message in case.messages if isinstance(message["content"], list) for part in message["content"]
        ]
        shown = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        assert list(map(id, shown)) == list(map(id, case.images)) and case.kind == kind


def test_a_picture_stands_in_every_place() -> None:
    def places(kind: str) -> Counter[str]:
        found: Counter[str] = Counter()
        for case in some(kind, 40):
            for number, message in enumerate(case.messages):
                if isinstance(message["content"], list):
                    order = "".join(part["type"][0] for part in message["content"])
                    found[f"{message['role']} {number} {order}"] += 1
        return found

    assert all(place.startswith("user 0 ti") for place in places("text-first"))
    between = places("between")
    assert all("tit" in place for place in between) and any("titi" in place for place in between)
    system = places("system")
    assert any(place.startswith("system 0") for place in system) and any(place.startswith("user 1") for place in system)
    assert {place[:6] for place in places("earlier")} >= {"user 0", "user 2", "user 4"} - {"user 6"}


def test_first_questions_are_answered_by_what_the_scene_holds() -> None:
    forms: Counter[str] = Counter()
    for case in some("first-questions", 60):
        forms[case.answer if case.answer in (sayings.NO_PICTURE, sayings.NO_TEXT) else case.answer.split(" ")[0]] += 1
        if not case.images:
            assert case.answer == sayings.NO_PICTURE
            continue
        (scene,) = case.scenes
        if scene.label is not None:
            assert case.answer.rstrip(".").split(" ")[-1] == scene.label.text.lower()
        elif case.answer != sayings.NO_TEXT:
            for thing in scene.things:
                assert thing.colour in case.answer and thing.shape.rstrip("s") in case.answer
    assert len(forms) == 4, forms


def test_what_is_not_known_has_one_answer_and_its_texts_and_photographs_are_kept_apart() -> None:
    asked: dict[Split, set[str]] = {split: set() for split in ("train", "test")}
    for split in asked:
        for case in some("unknown", 60, split):
            assert case.answer == sayings.UNKNOWN
            if case.words.form == "nothing":
                asked[split].add(case.question)
    assert not asked["train"] & asked["test"] and min(map(len, asked.values())) > 10
    for texts in (sayings.SYSTEM, sayings.OPENINGS, *sayings.ASKED_OF.values(), *sayings.FILLERS.values()):
        assert not set(sayings.dealt(texts, train=True)) & set(sayings.dealt(texts, train=False))
    for texts in sayings.ASKED_FIRST.values():
        both = set(sayings.dealt(texts, True, sayings.ALWAYS_TAUGHT)) & set(
            sayings.dealt(texts, False, sayings.ALWAYS_TAUGHT)
        )
        assert both == set(texts[: sayings.ALWAYS_TAUGHT])


def test_no_trained_use_holds_an_unseen_pair_and_every_unseen_one_asks_for_one() -> None:
    for kind in USES:
        for case in some(kind, 15, "train"):
            assert not {(thing.colour, thing.shape) for scene in case.scenes for thing in scene.things} & UNSEEN
        if kind in use_kinds_of("unseen"):
            assert all(case.words.pair in UNSEEN for case in some(kind, 8, "unseen"))


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Of the schemas that are used here."""
    if schema["type"] == "object":
        return list(value) == schema["required"] and all(
            fits(schema["properties"][name], value[name]) for name in value
        )
    if schema["type"] == "array":
        return all(fits(schema["items"], item) for item in value)
    return isinstance(value, {"string": str, "integer": int}[schema["type"]]) and value in schema.get("enum", [value])


def test_json_follows_its_schema_and_calls_their_tools_with_the_words_of_the_world() -> None:
    for case in some("json", 60):
        value = json.loads(case.answer)
        assert case.schema is not None and fits(case.schema, value), (case.schema, value)
        for thing in value.get("things", []):
            assert thing["colour"] in COLOURS and thing["shape"] in SHAPES
        if "position" in value or "place" in value:
            assert {*value.values()} <= {*PLACES}
    forms: Counter[str] = Counter()
    for case in some("tools", 60):
        forms[case.words.form] += 1
        named = {tool["function"]["name"]: tool["function"]["parameters"] for tool in case.tools}
        for call in case.calls:
            assert fits(named[call["function"]["name"]], json.loads(call["function"]["arguments"]))
        assert bool(case.calls) == (case.words.form == "call")
    assert set(forms) == {"call", "result", "no call"}


@pytest.mark.parametrize("kind", USES)
def test_what_is_learnt_follows_the_prompt_that_is_served(
    kind: str, model: tuple[ModelConfig, PromptTokenizer]
) -> None:
    """Training sees, token for token, what a server sends, and the answer is read as the right one."""
    config, tokenizer = model
    for case in some(kind, 4):
        sample = Learner(config, tokenizer).sample(case.dialogue(), case.tools, case.response_format)
        served = build_prompt(case.messages, config, tokenizer, tools=case.tools, response_format=case.response_format)
        if case.reasoning is None:
            assert np.array_equal(sample.prompt.ids_T[: len(served)], served.ids_T)
        learnt = tokenizer.decode(sample.prompt.ids_T[len(served) :].tolist()) if case.reasoning is None else ""
        if case.calls:
            functions = [call["function"] for call in case.calls]
            said = [(each["name"], json.loads(each["arguments"])) for each in functions]
            assert read_calls(learnt.removesuffix(END)) == said
        elif case.reasoning is None:
            assert learnt == case.answer + END


def test_calls_that_are_not_sound_are_none() -> None:
    parameter = '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>'
    call = f'<｜DSML｜invoke name="f">\n{parameter}\n</｜DSML｜invoke>'
    good = f"\n\n<｜DSML｜tool_calls>\n{call}\n</｜DSML｜tool_calls>"
    assert read_calls(good) == [("f", {"n": 2})]
    assert read_calls(good.replace("tool_calls", " calls").replace("｜invoke", "｜ invoke")) == [("f", {"n": 2})]
    for wrong in ("It is two.", f"So: {good}", good[:-5], good.replace("</｜DSML｜parameter>", "</parameter>")):
        assert read_calls(wrong) is None
    assert read_json("{1") is None


class Perfect:
    """Knows every case by its prompt or messages."""

    def __init__(self, cases: Sequence[Case], model: Model) -> None:
        self.config, self.tokenizer = model
        self.known = {self.key(case): case for case in cases}
        self.held: list[bool] = []

    def key(self, case: Case) -> bytes:
        return self.prompt(case.messages, case.tools, case.response_format).ids_T.tobytes() + self.pixels(case.messages)

    def pixels(self, messages: Any) -> bytes:
        lists = [message["content"] for message in messages if isinstance(message["content"], list)]
        return b"".join(
            part["image_url"]["url"].tobytes()[:3000] for parts in lists for part in parts if "image_url" in part
        )

    def prompt(self, messages: Any, tools: Any = (), response_format: Any = None) -> Prompt:
        return build_prompt(messages, self.config, self.tokenizer, tools=tools, response_format=response_format)

    def chat(self, messages: Any, params: Any, *, thinking: bool, effort: Any) -> list[Any]:
        keys = [self.prompt(chat).ids_T.tobytes() + self.pixels(chat) for chat in messages]
        return [SimpleNamespace(text=self.known[key].answer, reasoning="x" if thinking else None) for key in keys]

    def generate(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Any]:
        found = []
        for prompt, param in zip(prompts, params, strict=True):
            (case,) = [c for key, c in self.known.items() if key.startswith(prompt.ids_T.tobytes()) and in_form(c)]
            self.held.append(param.structured is not None)
            learnt = Learner(self.config, self.tokenizer).sample(case.dialogue(), case.tools, case.response_format)
            text = self.tokenizer.decode(learnt.prompt.ids_T[len(prompt) :].tolist())
            found.append(SimpleNamespace(text=text.removesuffix(END)))
        return found


def in_form(case: Case) -> bool:
    return bool(case.tools) or case.schema is not None


def test_who_knows_everything_gets_everything(model: Model) -> None:
    kinds, num = tuple(USES), 16
    cases = [make_any(3, number, "test", kinds=(kinds[number % len(kinds)],)) for number in range(num)]
    told = Perfect(cases, model)
    report = evaluate(told, num, 3, kinds=kinds)
    assert [verdict.said for verdict in report.verdicts if not verdict.right] == []
    assert Counter(verdict.kind for verdict in report.verdicts) == dict.fromkeys(kinds, 2)
    assert Counter(told.held) == {True: 2, False: 2}, "JSON is held to its schema, tools are not"


def test_a_kind_that_is_none_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="variant 'roman' has no questions of kind 'json'"):
        make_any(0, 0, kinds=("json",), variant="roman")
    with pytest.raises(ConfigError, match="split 'unseen' has no questions of kind 'unknown'"):
        make_any(0, 0, "unseen", kinds=("unknown",))
    for wrong in (
        ["--kinds", "colours"],
        ["--kinds", "json", "--control", "grey"],
        ["--kinds", "uses", "--variant", "french"],
    ):
        assert main(["eval", *wrong]) == 2
        assert f"--kinds: there is no kind '{wrong[1]}' here; there are colour" in capsys.readouterr().err
