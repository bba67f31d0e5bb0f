"""`LLM` on a checkpoint folder: every kind of prompt, together or streamed, with and without a tokenizer."""

from __future__ import annotations

from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from spyglass import LLM, Patches, SamplingParams
from spyglass.config.engine import EngineConfig
from spyglass.engine.detokenize import TokenBytes
from spyglass.engine.fit import free_memory
from spyglass.errors import CapacityError, ConfigError, PromptError
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.lora.write import write_adapter
from spyglass.machine import Device
from spyglass.prompt.build import prompt_from_parts
from spyglass.prompt.tokens import TokenKind

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "numerics": "plain"}


@pytest.fixture(scope="session")
def llm(tiny_folder: Path) -> LLM:
    return LLM(tiny_folder, **OPTIONS)


@pytest.fixture(scope="session")
def untokenized(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("models") / "bare"
    folder.mkdir()
    for file in tiny_folder.iterdir():
        if not file.name.startswith("tokenizer"):
            (folder / file.name).symlink_to(file)
    return LLM(folder, **OPTIONS)


def picture() -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def question(text: str, *images: object) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.mark.slow
def test_prompts_of_every_kind_and_length_answer_together_as_alone(llm: LLM, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    picture().save(photo)
    prompts: list[Any] = [
        "Hello, who are you?",
        [0, 128803, 77, 128804],
        np.array([0, 5, 6, 7]),
        [[0, 128803], picture(), [9, 10]],
        [[0], photo, photo.read_bytes(), [9]],
        prompt_from_parts([[0, 1, 2]], llm.config),
    ]
    together = llm.generate(prompts, GREEDY)
    alone = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert [o.usage.prompt_tokens for o in together][1:3] == [4, 4]
    assert together[3].usage.image_tokens > 90
    assert together[4].usage.image_tokens > 180
    assert all(o.text for o in together)


def test_one_prompt_may_be_given_without_a_list(llm: LLM) -> None:
    [text] = llm.generate("Hello", GREEDY)
    [ids] = llm.generate([llm.config.bos_token_id, *encode(llm, "Hello")], GREEDY)
    assert text.token_ids == ids.token_ids


def test_a_list_that_holds_a_picture_is_one_prompt_in_parts(llm: LLM, tmp_path: Path) -> None:
    photo = tmp_path / "photo.png"
    picture().save(photo)
    [expected] = llm.generate([[[0, 5], picture(), [9]]], GREEDY)
    for image in (picture(), photo, photo.read_bytes()):
        [one] = llm.generate([[0, 5], image, [9]], GREEDY)
        assert one.token_ids == expected.token_ids
    alone = Patches(np.zeros((12, 3, 14, 14), np.uint8), (3, 4))
    assert llm.generate(alone, GREEDY)[0].token_ids == llm.generate([[alone]], GREEDY)[0].token_ids
    assert llm.generate(torch.tensor([0, 5]), GREEDY)[0].token_ids == llm.generate([0, 5], GREEDY)[0].token_ids


@pytest.mark.parametrize(
    "ask",
    [
        lambda m: m.generate(5),
        lambda m: m.generate(None),
        lambda m: m.generate([None]),
        lambda m: m.generate({5, 6}),
        lambda m: m.generate({"role": "user", "content": "x"}),
        lambda m: m.generate([{"role": "user", "content": "x"}]),
        lambda m: m.generate(number for number in (5, 6)),
        lambda m: m.chat(None),
        lambda m: m.chat({"role": "user", "content": "x"}),
        lambda m: m.stream(7),
        lambda m: m.logits(None),
        lambda m: m.generate([5], {"temperature": 1}),
        lambda m: m.generate([5], 7),
        lambda m: m.generate([[5]], [None]),
        lambda m: m.stream([5], 7),
    ],
)
def test_what_is_no_prompt_and_no_parameters_is_refused_in_words(ask: Any, llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"prompt|conversation|SamplingParams"):
        ask(llm)
    assert not llm.engine.has_work


def test_logits_that_cannot_be_held_are_refused_before_memory_is_taken(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CapacityError, match="1000000 tokens"):
        llm.logits(np.full(10**6, 5))

    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(CapacityError, match="1,034,240 bytes"):
        llm.logits([5, 6])


def encode(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode_text(text)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    short, long = llm.generate(
        ["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3, ignore_eos=True)]
    )
    assert (len(short.token_ids), len(long.token_ids)) == (1, 3)
    with pytest.raises(PromptError, match="2 prompts with 1"):
        llm.generate(["a", "b"], [GREEDY])


def test_chat_answers_one_conversation_or_many(llm: LLM) -> None:
    one = llm.chat(question("What is this?", picture()), GREEDY)
    many = llm.chat([question("What is this?", picture()), question("Hello")], GREEDY)
    assert many[0].token_ids == one.token_ids
    assert (one.usage.image_tokens > 0, many[1].usage.image_tokens) == (True, 0)


def test_thinking_changes_the_end_of_the_prompt(llm: LLM) -> None:
    plain = llm.chat_prompt(question("Hello"))
    thinking = llm.chat_prompt(question("Hello"), thinking=True)
    assert (plain.ids_T[-1], thinking.ids_T[-1]) == (128822, 128821)
    assert len(llm.chat_prompt(question("Hello"), thinking=True, effort="max")) > len(plain)


@pytest.mark.slow
def test_a_stream_adds_up_to_the_answer(llm: LLM) -> None:
    params = SamplingParams(seed=4, max_tokens=12, ignore_eos=True)
    deltas = list(llm.stream(question("Hello"), params))
    output = deltas[-1].output
    assert output is not None and output.token_ids == llm.chat(question("Hello"), params).token_ids
    assert "".join(delta.text for delta in deltas) == output.text
    assert all(delta.output is None for delta in deltas[:-1])
    [generated] = llm.generate("Hello", params)
    assert [t for d in llm.stream("Hello", params) for t in d.token_ids] == list(generated.token_ids)


def test_streams_may_be_read_in_turn_and_closed_early(llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=6, ignore_eos=True)
    alone = {text: [d.token_ids for d in llm.stream(text, params)] for text in ("one", "two", "three")}
    streams = {text: llm.stream(text, replace(params, max_tokens=500 if text == "three" else 6)) for text in alone}
    first = {text: [next(stream).token_ids] for text, stream in streams.items()}
    streams["three"].close()  # type: ignore[attr-defined]  # a generator
    for text in ("two", "one"):
        assert first[text] + [d.token_ids for d in streams[text]] == alone[text]
    assert not llm.engine.has_work
    llm.engine.prefixes.clear()
    assert {pool.num_used for pool in llm.engine.allocator.pools.values()} == {0}


def test_a_stream_that_nobody_reads_costs_nothing(llm: LLM) -> None:
    llm.stream("Hello", GREEDY)
    assert not llm.engine.has_work


def test_every_engine_option_is_an_option_of_the_model() -> None:
    options = {field.name for field in fields(EngineConfig)}
    assert options <= set(signature(LLM.__init__).parameters)


def test_logits_have_a_row_per_position_blocks_included(llm: LLM) -> None:
    parts: list[Any] = [[0, 128803], picture(), [9, 10]]
    prompt = prompt_from_parts(parts, llm.config)
    logits = llm.logits(parts)
    assert logits.dtype == torch.float32 and logits.shape == (len(prompt), llm.config.text.vocab_size)
    [output] = llm.generate([parts], SamplingParams(max_tokens=1, temperature=0, logprobs=0, prompt_logprobs=0))
    own = logits.log_softmax(-1)
    assert output.logprobs is not None and output.prompt_logprobs is not None
    assert output.logprobs[0].logprob == pytest.approx(float(own[-1, output.token_ids[0]]), abs=1e-4)
    last = output.prompt_logprobs[-1]
    assert last is not None and last.logprob == pytest.approx(float(own[-2, 10]), abs=1e-4)
    assert torch.equal(llm.logits([0, 5, 6]), llm.logits([[0, 5], [6]]))


def test_a_folder_without_a_tokenizer_serves_ids_and_pictures(llm: LLM, untokenized: LLM) -> None:
    grid = (6, 9)
    pixels = np.random.default_rng(1).integers(0, 256, (54, 3, 14, 14), dtype=np.uint8)
    parts: list[Any] = [[0, 5], Patches(pixels, grid), [7]]
    assert torch.allclose(untokenized.logits(parts), llm.logits(parts), atol=1e-5)
    [output] = untokenized.generate([[0, 5, 6]], GREEDY)
    assert output.text == "" and output.token_ids == llm.generate([[0, 5, 6]], GREEDY)[0].token_ids


@pytest.mark.parametrize("ask", [lambda m: m.generate("text"), lambda m: m.chat(question("text"))])
def test_text_without_a_tokenizer_is_refused_clearly(ask: Any, untokenized: LLM) -> None:
    with pytest.raises(PromptError, match=r"tokenizer\.json"):
        ask(untokenized)


def test_normalised_patches_and_pixels_may_stand_in_one_prompt(llm: LLM) -> None:
    """The table of the 256 pixel values is the only difference between the two forms."""
    pixels = np.random.default_rng(2).integers(0, 256, (12, 3, 14, 14), dtype=np.uint8)
    table = torch.arange(256).float().div(255).sub(0.5).div(0.5).bfloat16().float().numpy()
    floats = Patches(table[pixels], (3, 4))
    mixed = llm.logits([[0], Patches(pixels, (3, 4)), floats, [5]])
    assert torch.allclose(mixed, llm.logits([[0], floats, floats, [5]]), atol=1e-5)


def test_images_0_leaves_the_tower_out_and_refuses_pictures(tiny_folder: Path) -> None:
    closed = LLM(tiny_folder, **OPTIONS, images=0)
    assert closed.loaded.model.vision is None
    with pytest.raises(PromptError, match="images"):
        closed.chat(question("What is this?", picture()))
    assert closed.chat(question("Hello"), GREEDY).text


def test_more_pictures_than_allowed_are_refused(tiny_folder: Path) -> None:
    with pytest.raises(PromptError, match="limit is 1"):
        LLM(tiny_folder, **OPTIONS, images=1).chat(question("Compare", picture(), picture()))


def test_one_bad_request_of_many_is_named_and_nothing_runs(llm: LLM) -> None:
    with pytest.raises(PromptError, match="request 1"):
        llm.generate([[0, 5], [0, 10**6], [0]], GREEDY)
    with pytest.raises(CapacityError, match="request 2"):
        llm.generate([[0, 5], [0], [5] * 20_000], GREEDY)
    with pytest.raises(PromptError, match="request 0"):
        llm.chat([[{"role": "user", "content": [{"type": "audio"}]}], question("Hello")])
    assert not llm.engine.has_work


def test_weights_beyond_the_free_memory_are_refused_before_they_are_read(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spyglass.engine.fit.host_memory", lambda: Device("host", 10**9, 10**6))
    with pytest.raises(CapacityError, match=r"take 0\.08 GB and 0\.00 GB are free here; .*check .* --plan"):
        LLM(tiny_folder, **OPTIONS)


@pytest.fixture(scope="module")
def large_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 13 MB."""
    folder = tmp_path_factory.mktemp("adapter")
    pair = LowRank(a_RI=torch.ones(512, 128), b_OR=torch.ones(512, 512), alpha=1.0)
    narrow = replace(pair, b_OR=torch.ones(128, 512))
    names = {f"layers.{layer}.attn.{name}" for layer in range(5) for name in ("wq_a", "wkv")}
    write_adapter(folder, AdapterFile(modules={n: narrow if n.endswith("a") else pair for n in names}))
    return folder


def test_adapters_beyond_the_free_memory_are_refused_before_weights_are_read(
    tiny_folder: Path, large_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for the weights, not for what goes beside them."""
    monkeypatch.setattr("spyglass.engine.fit.host_memory", lambda: Device("host", 10**9, 85 * 10**6))
    monkeypatch.setattr("spyglass.engine.load.load_model", None)
    with pytest.raises(CapacityError, match=r"take 0\.08 GB, its adapters 0\.01 GB, and 0\.0. GB are free here"):
        LLM(tiny_folder, **OPTIONS, adapters={"large": large_adapter})


def test_an_adapter_that_comes_later_must_fit_beside_the_model(
    tiny_folder: Path, large_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny_folder, **OPTIONS, images=0)
    monkeypatch.setattr("spyglass.engine.fit.host_memory", lambda: Device("host", 10**9, 10**6))
    with pytest.raises(CapacityError, match=r"takes 0\.01 GB and 0\.00 GB are free beside the model"):
        llm.add_adapter("large", large_adapter)
    assert llm.adapters == ()
    monkeypatch.setattr("spyglass.engine.fit.host_memory", lambda: Device("host", 10**9, 10**9))
    llm.add_adapter("large", large_adapter)
    assert llm.adapters == ("large",)


@pytest.mark.slow
def test_a_system_that_does_not_tell_its_memory_refuses_nothing(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spyglass.engine.fit.host_memory", lambda: Device("host", 0, 0))
    assert LLM(tiny_folder, **OPTIONS, images=0).logits([0, 5]).shape[0] == 2


def test_misspelt_and_meaningless_options_are_errors(tiny_folder: Path) -> None:
    with pytest.raises(TypeError):
        LLM(tiny_folder, max_tokenz=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="max_step_tokens"):
        LLM(tiny_folder, **OPTIONS, max_step_tokens=0)
    with pytest.raises(ConfigError, match="at least 384"):
        LLM(tiny_folder, **OPTIONS, max_step_tokens=128)


@pytest.mark.slow
def test_options_come_from_the_environment_when_left_out(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPYGLASS_MAX_LENGTH", "40")
    model = LLM(tiny_folder, **OPTIONS, images=0)
    assert model.engine.max_length == 40
    [output] = model.generate([[0, 5]], SamplingParams(max_tokens=None, ignore_eos=True))
    assert output.usage.prompt_tokens + output.usage.completion_tokens == 40


@pytest.mark.slow
def test_prompt_only_ids_are_never_drawn(llm: LLM) -> None:
    """BOS, pad, the placeholder and the reserved tokens that play picture roles elsewhere; end of text may be."""
    roles = {129257 + kind for kind in TokenKind if kind is not TokenKind.TEXT}
    assert llm.banned_tokens == {0, 2, 129264} | roles
    flat = [SamplingParams(temperature=1e6, max_tokens=25, ignore_eos=True, seed=seed) for seed in range(16)]
    drawn = {token for output in llm.generate([[0, 5]] * 16, flat) for token in output.token_ids}
    assert len(drawn) > 380 and not drawn & llm.banned_tokens
    assert not llm.banned_tokens & set(llm.config.eos_token_ids)


def test_box_tags_come_out_as_text(llm: LLM) -> None:
    """The answer's ids decide the text, so an answer with a box is spelled with its tags."""
    assert llm.tokenizer is not None
    token_bytes = TokenBytes(llm.tokenizer)
    ids = [129276, *encode(llm, "[[1,2,3,4]]"), 129275, 1]
    assert b"".join(token_bytes[i] for i in ids).decode() == "<｜box｜>[[1,2,3,4]]<｜/box｜>"


def test_stop_strings_end_a_real_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    whole = llm.generate("Hello", params)[0].text
    middle = whole[len(whole) // 2 :][:2]
    [output] = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop=middle))
    assert (output.finish_reason, output.stopped_by) == ("stop", middle)
    assert output.text == whole[: whole.find(middle)]


def test_rows_have_a_fixed_memory_where_the_system_tells_what_is_free(llm: LLM) -> None:
    most = llm.engine.allocator.max_tokens_alone
    assert (most is None) == (free_memory(llm.loaded.device) is None)
