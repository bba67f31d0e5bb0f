"""Structured answers: whatever the model would rather say, the answer has the form asked for."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spyglass import LLM, SamplingParams, Structured
from spyglass.engine.detokenize import TokenBytes
from spyglass.engine.request import Delta
from spyglass.engine.structured.compile import repeats
from spyglass.engine.structured.grammar import GrammarCompiler
from spyglass.engine.structured.sandbox import GrammarSandbox
from spyglass.errors import PromptError
from spyglass.prompt.build import prompt_from_parts

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "grün", "синий"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["colour", "count", "note"],
    "additionalProperties": False,
}
EBNF = 'root ::= "<" [a-c]+ ">" | "none"'
LARK = 'start: "(" INT ")"\nINT: /[0-9]{1,4}/'


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    return LLM(tiny_folder, device="cpu", dtype="float32", numerics="plain")


def asked(kind: Any, value: Any = None, after: str | None = None, **more: Any) -> SamplingParams:
    structured = Structured(kind=kind, value=value, after=after)
    return SamplingParams(**{"structured": structured, "max_tokens": 96, "seed": 1, **more})


def answers(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    return llm.generate([[0, 5, 6, 7]] * len(params), params)


@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("regex", r"(red|blue) [0-9]{2}[äß]", r"(red|blue) [0-9]{2}[äß]"),
        ("choice", ["yes", "no", 'a "quote"\\', "naïve 图"], r'yes|no|a "quote"\\|naïve 图'),
        ("grammar", EBNF, r"<[a-c]+>|none"),
        ("grammar", LARK, r"\([0-9]{1,4}\)"),
    ],
)
def test_an_answer_has_the_form_asked_for(llm: LLM, kind: str, value: Any, pattern: str) -> None:
    outputs = answers(llm, [asked(kind, value, seed=seed) for seed in range(8)] + [asked(kind, value, temperature=0)])
    done = [output for output in outputs if output.finish_reason == "stop"]
    assert len(done) >= 5, "most of these forms end by themselves"
    for output in done:
        assert re.fullmatch(pattern, output.text), output.text


def test_json_by_schema_parses_and_obeys_the_schema(llm: LLM) -> None:
    params = [asked("json_schema", SCHEMA, seed=seed, logit_bias=no_blanks(llm)) for seed in range(6)]
    for output in answers(llm, params):
        assert output.finish_reason == "stop"
        value = json.loads(output.text)
        assert set(value) == {"colour", "count", "note"}
        assert value["colour"] in SCHEMA["properties"]["colour"]["enum"]
        assert 0 <= value["count"] <= 99 and len(value["note"]) <= 6


def no_blanks(llm: LLM) -> dict[int, float]:
    """A random model would fill up JSON with blanks until its tokens run out; a trained one does not."""
    assert llm.tokenizer is not None
    spelled = ((token, llm.tokenizer.spelling(token)) for token in range(llm.config.text.vocab_size))
    return {token: -100.0 for token, text in spelled if text and set(text) <= set("ĠĊĉč")}


def test_a_form_that_was_checked_is_followed_by_each_answer_and_not_compiled_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run where `submit` is called, so nothing may be compiled there."""
    prompt, params = prompt_from_parts([[0, 5, 6, 7]], llm.config), asked("regex", "[ab]{3}c")
    prepared = llm.engine.prepare(prompt, params)
    assert prepared.matcher is not None

    def begin(forms: GrammarCompiler, structured: Structured) -> None:
        raise AssertionError("a form is compiled between two steps")

    monkeypatch.setattr(GrammarCompiler, "begin", begin)
    for _ in range(2):
        requests = [llm.engine.submit(replace(prepared, params=replace(params, seed=seed))) for seed in range(2)]
        deltas: list[Delta] = []
        while llm.engine.has_work:
            deltas += llm.engine.step()
        outputs = {delta.request_id: delta.output for delta in deltas if delta.output is not None}
        assert [re.fullmatch("[ab]{3}c", outputs[request].text) is not None for request in requests] == [True, True]


def test_any_json_begins_an_object(llm: LLM) -> None:
    for output in answers(llm, [asked("json", seed=seed, max_tokens=12) for seed in range(4)]):
        assert output.text.lstrip()[:1] == "{"


def test_a_free_string_never_holds_an_added_token(llm: LLM) -> None:
    assert llm.tokenizer is not None
    outputs = answers(llm, [asked("regex", "(?s:.{200,})", seed=seed, max_tokens=200) for seed in range(4)])
    for output in outputs:
        assert not set(output.token_ids) & llm.tokenizer.added_ids


def test_an_answer_ends_where_its_form_does_even_without_end_of_text(llm: LLM) -> None:
    (output,) = answers(llm, [asked("regex", "abc", ignore_eos=True)])
    assert (output.text, output.finish_reason) == ("abc", "stop")
    (output,) = answers(llm, [asked("choice", ["a", "ab"], temperature=0)])
    assert output.text in ("a", "ab") and output.finish_reason == "stop"


def test_a_form_that_is_cut_short_ends_by_length(llm: LLM) -> None:
    (output,) = answers(llm, [asked("regex", "[a-z]{400}", max_tokens=3)])
    assert output.finish_reason == "length" and re.fullmatch("[a-z]+", output.text)


def test_a_form_holds_only_behind_the_token_it_follows(llm: LLM) -> None:
    assert llm.tokenizer is not None
    end = llm.tokenizer.special_id("</think>")
    assert end is not None
    params = asked("choice", ["blue"], after="</think>", seed=3, logit_bias={}, max_tokens=6)
    (free,) = answers(llm, [params])
    (plain,) = answers(
        llm, [SamplingParams(seed=3, max_tokens=6, logit_bias=dict.fromkeys(llm.config.eos_token_ids, -100.0))]
    )
    assert free.token_ids == plain.token_ids, "nothing is restricted while the model reasons, but that it may not end"
    forced = asked("choice", ["blue"], after="</think>", temperature=0, logit_bias={end: 100.0}, max_tokens=40)
    (output,) = answers(llm, [forced])
    assert output.token_ids[0] == end and output.text == "</think>blue"


def test_an_answer_may_not_end_before_its_form_has_begun(llm: LLM) -> None:
    assert llm.tokenizer is not None
    think_end, (end, *_) = llm.tokenizer.special_id("</think>"), llm.config.eos_token_ids
    assert think_end is not None
    wants_to_end: Any = {"temperature": 0, "logit_bias": {end: 100.0}, "max_tokens": 5}
    (free,) = answers(llm, [SamplingParams(**wants_to_end)])
    (held,) = answers(llm, [asked("choice", ["blue"], after="</think>", **wants_to_end)])
    assert free.token_ids == (end,)
    assert held.finish_reason == "length" and len(held.token_ids) == 5 and end not in held.token_ids
    wants_to_end["logit_bias"][think_end] = 99.0
    (output,) = answers(llm, [asked("choice", ["blue"], after="</think>", **{**wants_to_end, "max_tokens": 40})])
    assert output.text == "</think>blue" and output.finish_reason == "stop"


def test_structured_and_free_answers_together_are_as_alone(llm: LLM) -> None:
    params = [
        asked("regex", "[a-f]{4,9}", seed=1),
        SamplingParams(seed=2, max_tokens=9),
        asked("json_schema", SCHEMA, seed=3, max_tokens=20),
        SamplingParams(temperature=0, max_tokens=5),
        asked("choice", ["one", "three"], temperature=0),
    ]
    together = answers(llm, params)
    alone = [answers(llm, [each])[0] for each in params]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


def test_logprobs_are_the_models_own_under_a_form_and_a_bias(llm: LLM) -> None:
    (free,) = answers(llm, [SamplingParams(temperature=0, max_tokens=1, logprobs=5)])
    (bound,) = answers(llm, [asked("choice", ["blue"], temperature=0, max_tokens=1, logprobs=5)])
    (biased,) = answers(llm, [SamplingParams(temperature=0, max_tokens=1, logprobs=5, logit_bias={77: 100.0})])
    assert free.logprobs and bound.logprobs and biased.logprobs
    assert bound.logprobs[0].top == free.logprobs[0].top == biased.logprobs[0].top
    assert biased.token_ids == (77,) != free.token_ids


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "(open"),
        ("grammar", "start: missing_rule"),
        ("grammar", "root ::= ("),
        ("json_schema", {"type": "objekt"}),
        ("json_schema", {"$ref": "#/nowhere"}),
        ("json_schema", {"type": "array", "uniqueItems": True}),
        ("json_schema", {"enum": []}),
        ("json_schema", {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!a)b$"}}}),
        ("json_schema", {"x-guidance": {"lenient": True}, "not": {"type": "string"}}),
        ("json_schema", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
        ("regex", r"[^\s\S]"),
        ("grammar", 'start: "a" start'),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_at_once(llm: LLM, kind: str, value: Any) -> None:
    with pytest.raises(PromptError, match=kind):
        answers(llm, [asked(kind, value)])


@pytest.mark.parametrize(
    ("kind", "value"),
    [("xml", "a"), ("regex", ""), ("regex", 3), ("choice", []), ("choice", [""]), ("json_schema", "{}"), ("json", 1)],
)
def test_a_value_that_is_not_of_its_kind_is_refused_by_name(kind: Any, value: Any) -> None:
    with pytest.raises(PromptError, match=str(kind)):
        Structured(kind=kind, value=value)


def test_a_form_needs_a_tokenizer_with_its_tokens(llm: LLM) -> None:
    with pytest.raises(PromptError, match="no special token"):
        answers(llm, [asked("choice", ["a"], after="<no such token>")])


def test_a_bias_for_an_id_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(PromptError, match="logit_bias"):
        answers(llm, [SamplingParams(logit_bias={llm.config.text.vocab_size: 1.0})])
    for bad in ({-1: 1.0}, {1: 101.0}, {1: float("nan")}, {"1": 1.0}, [1]):
        with pytest.raises(PromptError, match="logit_bias"):
            SamplingParams(logit_bias=bad)  # type: ignore[arg-type]


def test_forms_are_compiled_from_several_threads_alike(llm: LLM) -> None:
    found: list[object] = []

    def compile_all() -> None:
        for number in range(20):
            try:
                llm.engine.prepare(prompt_from_parts([[0, 1]], llm.config), asked("regex", f"a{{{number}}}b"))
            except Exception as error:
                found.append(error)

    threads = [threading.Thread(target=compile_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not found


def test_masks_report_what_the_model_hid_of_them(llm: LLM) -> None:
    answers(llm, [asked("regex", "[a-z]{20}", max_tokens=10)])
    assert 0 < llm.engine.stats().mask_share <= 1


def test_a_folder_without_a_tokenizer_refuses_forms(tiny_folder: Path, tmp_path: Path) -> None:
    for file in tiny_folder.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    bare = LLM(tmp_path, device="cpu", dtype="float32", numerics="plain")
    with pytest.raises(PromptError, match="tokenizer"):
        answers(bare, [asked("choice", ["a"])])


@pytest.mark.parametrize("grammar", ["start: <[0]>", 'start: "a" <[0]>'])
def test_a_form_of_tokens_that_are_never_drawn_ends_only_its_own_answer(llm: LLM, grammar: str) -> None:
    """And it says so: nothing is wrong with the model or with what is cached, so that stays."""
    llm.generate([[0] + [5, 6, 7] * 100], SamplingParams(max_tokens=1))
    kept = len(llm.engine.prefixes)
    wrong, right = llm.generate([[0, 5, 6]] * 2, [asked("grammar", grammar), asked("choice", ["yes"])])
    assert wrong.grammar_violation and "never drawn" in (wrong.error or "") and right.text == "yes"
    assert kept and len(llm.engine.prefixes) >= kept


def test_a_choice_may_be_among_thousands(llm: LLM) -> None:
    texts = [f"{number}: a|(b)*[{number}]" for number in range(5000)]
    (output,) = answers(llm, [asked("choice", texts)])
    assert output.text in texts and output.finish_reason == "stop"


def chained(kind: str, links: int) -> Any:
    """A form that refers to itself link by link, so long that an ordinary thread's stack does not hold them all."""
    if kind == "grammar":
        return "\n".join(["start: a0", *(f"a{link}: a{link + 1}" for link in range(links)), f'a{links}: "x"'])
    defined = {f"d{link}": {"$ref": f"#/$defs/d{link + 1}"} for link in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": {**defined, f"d{links}": {"const": "x"}}}


@pytest.mark.parametrize(("kind", "links"), [("grammar", 15_000), ("json_schema", 5_000)])
def test_a_long_chain_of_references_does_not_end_the_process(llm: LLM, kind: str, links: int) -> None:
    (output,) = answers(llm, [asked(kind, chained(kind, links))])
    assert output.text.strip('"') == "x"


@pytest.mark.parametrize("kind", ["grammar", "json_schema"])
def test_a_form_longer_than_what_the_stack_was_measured_for_is_refused(llm: LLM, kind: str) -> None:
    with pytest.raises(PromptError, match=f"the {kind} asked for has .* characters"):
        answers(llm, [asked(kind, chained(kind, 30_000))])


def test_a_form_without_measure_is_refused_before_it_runs(llm: LLM) -> None:
    with pytest.raises(PromptError, match="cannot be followed") as caught:
        llm.generate([[0, 5]], asked("regex", "(((a{100}){100}){100}){100}b"))
    assert "\n" not in str(caught.value), "without the inner state of the library"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "a?" * 5000),
        ("regex", "(x|yy){2,3}?" * 5000),
        ("json_schema", {"properties": {"a": {"items": {"type": "string", "pattern": "b*" * 5000}}}}),
        ("json_schema", {"patternProperties": {"[ab]+" * 5000: {}}}),
    ],
)
def test_a_pattern_whose_work_its_text_tells_is_refused_without_a_trial(
    kind: str, value: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarSandbox, "seconds", lambda *_: pytest.fail("it was tried"))
    forms = GrammarCompiler(TokenBytes(llm.tokenizer), llm.config, cpu_seconds=600)  # type: ignore[arg-type]  # it has one
    with pytest.raises(PromptError, match=f"the {kind} asked for has a pattern with 5,000 parts .*; 4,096 may be"):
        forms.begin(Structured(kind=kind, value=value))


def test_what_repeats_nothing_counts_as_nothing() -> None:
    assert repeats(r"(?:a|b)\?\*[xyz]") == 0
    assert repeats(r"a?b*?c+d{2}e{1,}?") == 5
    assert repeats(r"[?*+]x[^]*]\[y?") == 1, "a class of characters repeats nothing"
    assert repeats(r"a?b?|c?|(d?|e?)f?") == 3, "only alternatives of the whole are apart"


def test_parts_without_end_are_counted_by_the_library_before_it_builds(llm: LLM) -> None:
    words = tuple(f"{number} {number * 7919 % 10007}" for number in range(9000))
    assert llm.generate([[0, 5]], asked("choice", words))[0].finish_reason in ("stop", "length")
    with pytest.raises(PromptError, match="it has too many parts; make it smaller"):
        llm.generate([[0, 5]], asked("grammar", f"start: /{'a?' * 60_000}/"))


def test_a_form_that_is_long_to_compile_holds_no_other_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on = threading.Event(), threading.Event()
    seconds = GrammarSandbox.seconds

    def slow(trials: GrammarSandbox, kind: str, request: str) -> float:
        if "slow" in request:
            began.set()
            assert go_on.wait(30)
        return seconds(trials, kind, request)

    monkeypatch.setattr(GrammarSandbox, "seconds", slow)
    forms = GrammarCompiler(TokenBytes(llm.tokenizer), llm.config, cpu_seconds=600)  # type: ignore[arg-type]  # it has one
    waiting = threading.Thread(target=forms.begin, args=(Structured(kind="choice", value=("slow",)),))
    waiting.start()
    assert began.wait(30)
    forms.begin(Structured(kind="choice", value=("quick",)))
    go_on.set()
    waiting.join()


def test_a_form_is_tried_once_and_those_kept_took_few_seconds_together(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long to compile takes memory: three of three seconds are one too many."""
    tried: list[str] = []
    monkeypatch.setattr(GrammarSandbox, "seconds", lambda trials, kind, request: tried.append(request) or 3.0)
    forms = GrammarCompiler(TokenBytes(llm.tokenizer), llm.config, cpu_seconds=600)  # type: ignore[arg-type]  # it has one
    for text in "aabcbca":
        forms.begin(Structured(kind="regex", value=text))
    assert [json.loads(request)[1] for request in tried] == ["a", "b", "c", "a"]


def test_of_forms_those_asked_for_last_are_kept(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def seconds(trials: GrammarSandbox, kind: str, request: str) -> float:
        tried.append(json.loads(request)[1])
        return 9.0 if "slow" in request else 0.0

    monkeypatch.setattr(GrammarSandbox, "seconds", seconds)
    monkeypatch.setattr("spyglass.engine.structured.grammar.KEPT", 2)
    forms = GrammarCompiler(TokenBytes(llm.tokenizer), llm.config, cpu_seconds=600)  # type: ignore[arg-type]  # it has one
    for text in ("a", "b", "a", "c", "a", "b", "slow", "slow"):
        forms.begin(Structured(kind="regex", value=text))
    assert tried == ["a", "b", "c", "b", "slow"], "one that took too long for any other is kept alone"


def test_no_end_token_is_drawn_before_an_answer_has_its_least_length(llm: LLM) -> None:
    """A bias makes every token an end token: it comes at once, or right behind the least length."""
    end = llm.config.eos_token_ids[0]
    for least in (0, 3):
        params = SamplingParams(min_tokens=least, max_tokens=9, logit_bias={end: 100.0}, seed=1)
        output = llm.generate([[0, 5, 6]], params)[0]
        assert (len(output.token_ids), output.finish_reason) == (least + 1, "stop")
    stop = SamplingParams(min_tokens=2, max_tokens=9, stop_token_ids=[7], logit_bias={7: 100.0}, seed=1)
    assert len(llm.generate([[0, 5, 6]], stop)[0].token_ids) == 3
    with pytest.raises(PromptError, match="more than max_tokens"):
        SamplingParams(min_tokens=9, max_tokens=3)
