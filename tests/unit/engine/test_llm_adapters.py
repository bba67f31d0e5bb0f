"""`LLM` with adapters: by name, many at once, each request its own, and nothing half-loaded or silently ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import spyglass.engine.llm
from spyglass import LLM, SamplingParams
from spyglass.errors import AdapterError, ConfigError
from spyglass.layers.linear import Linear
from spyglass.lora.write import write_adapter
from tests.adapter_parts import random_adapter, shapes_of

pytestmark = pytest.mark.slow  # loads a model from disk
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "numerics": "plain"}
PROMPT = [0, 128803, 77, 78, 79, 128804]


@pytest.fixture(scope="module")
def adapters(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three folders: two that read, one that sees as well."""
    folder = tmp_path_factory.mktemp("adapters")
    shapes = shapes_of(LLM(tiny_folder, **OPTIONS).loaded.model)
    made = {"a": ["attention"], "b": ["shared", "compressor"], "sees": ["attention", "aligner", "tower"]}
    for seed, (name, groups) in enumerate(made.items()):
        write_adapter(folder / name, random_adapter(shapes, groups, rank=4, seed=seed, size=1.0))
    return {name: folder / name for name in made}


@pytest.fixture(scope="module")
def llm(tiny_folder: Path, adapters: dict[str, Path]) -> LLM:
    return LLM(tiny_folder, adapters={name: adapters[name] for name in ("a", "b")}, **OPTIONS)


def test_each_prompt_of_a_list_has_its_own_adapter(llm: LLM) -> None:
    base, a, b = llm.generate([PROMPT] * 3, GREEDY, adapter=[None, "a", "b"])
    assert len({base.token_ids, a.token_ids, b.token_ids}) == 3
    for name, together in ((None, base), ("a", a), ("b", b)):
        assert llm.generate(PROMPT, GREEDY, adapter=name)[0].token_ids == together.token_ids
        pieces = list(llm.stream(PROMPT, GREEDY, adapter=name))
        assert pieces[-1].output is not None and pieces[-1].output.token_ids == together.token_ids
        chat = [{"role": "user", "content": "Hello"}]
        assert llm.chat(chat, GREEDY, adapter=name).token_ids == llm.chat([chat], GREEDY, adapter=[name])[0].token_ids
    assert llm.adapters == ("a", "b")
    assert (llm.logits(PROMPT, adapter="a") - llm.logits(PROMPT)).abs().max() > 0.1


def test_an_empty_path_is_refused_and_not_the_folder_here(
    llm: LLM, tiny_folder: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_folder)
    with pytest.raises(ConfigError, match="model's name is empty"):
        LLM("", **OPTIONS)
    monkeypatch.chdir(adapters["a"])
    with pytest.raises(AdapterError, match="folder is empty"):
        LLM(tiny_folder, adapters={"x": ""}, **OPTIONS)
    with pytest.raises(AdapterError, match="folder is empty"):
        llm.add_adapter("x", "")
    with pytest.raises(AdapterError, match="''"):
        llm.generate(PROMPT, GREEDY, adapter="")
    assert llm.adapters == ("a", "b")


def test_rows_take_their_memory_after_the_adapters_have_theirs(
    tiny_folder: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    real = spyglass.engine.llm.with_cache_bytes

    def look(options: Any, loaded: Any, *others: Any) -> Any:
        seen.append(any(isinstance(m, Linear) and m.adapter is not None for m in loaded.model.modules()))
        return real(options, loaded, *others)

    monkeypatch.setattr(spyglass.engine.llm, "with_cache_bytes", look)
    LLM(tiny_folder, adapters={"a": adapters["a"]}, **OPTIONS)
    LLM(tiny_folder, **OPTIONS)
    assert seen == [True, False]


def test_a_name_that_is_not_known_fails_its_own_call_and_lists_the_known_ones(llm: LLM) -> None:
    with pytest.raises(AdapterError, match=r"^request 1: there is no adapter 'my-lroa'; known are: a, b$"):
        llm.generate([PROMPT] * 3, GREEDY, adapter=["a", "my-lroa", None])
    with pytest.raises(AdapterError, match="no adapter 'c'"):
        next(llm.stream(PROMPT, GREEDY, adapter="c"))
    with pytest.raises(AdapterError, match="3 prompts with 1 adapters"):
        llm.generate([PROMPT] * 3, GREEDY, adapter=["a"])
    with pytest.raises(AdapterError, match="name of one for all"):
        llm.generate(PROMPT, GREEDY, adapter=3)  # type: ignore[arg-type]
    assert not llm.engine.has_work, "nothing of the refused calls was left behind"


def test_another_adapter_under_an_old_name_is_the_new_one_wholly(tiny_folder: Path, adapters: dict[str, Path]) -> None:
    """Pictures too; the digests that caches look things up by differ, whatever the name."""
    llm = LLM(tiny_folder, adapters={"x": adapters["a"]}, **OPTIONS)
    first, old = llm.logits(PROMPT, adapter="x"), llm.adapter_use("x")
    llm.remove_adapter("x")
    with pytest.raises(AdapterError, match="known are: none"):
        llm.logits(PROMPT, adapter="x")
    llm.add_adapter("x", adapters["sees"])
    new = llm.adapter_use("x")
    fresh = LLM(tiny_folder, adapters={"y": adapters["sees"]}, **OPTIONS)
    assert torch.equal(llm.logits(PROMPT, adapter="x"), fresh.logits(PROMPT, adapter="y"))
    assert not torch.equal(llm.logits(PROMPT, adapter="x"), first)
    assert (
        new.adapter_id != old.adapter_id
        and new.text_digest != old.text_digest
        and new.vision_digest != old.vision_digest
    )
    assert old.vision_digest == b"" and (new.text_digest, new.vision_digest) == (
        fresh.adapter_use("y").text_digest,
        fresh.adapter_use("y").vision_digest,
    )


def test_an_adapter_in_use_is_not_taken_away(llm: LLM, adapters: dict[str, Path]) -> None:
    llm.add_adapter("c", adapters["sees"])
    stream = llm.stream(PROMPT, GREEDY, adapter="c")
    next(stream)
    with pytest.raises(AdapterError, match="'c' is used by 1 answers under way"):
        llm.remove_adapter("c")
    stream.close()  # type: ignore[attr-defined]
    llm.remove_adapter("c")
    assert llm.adapters == ("a", "b")


def test_running_answers_do_not_notice_loads_that_succeed_or_fail(
    llm: LLM, adapters: dict[str, Path], tmp_path: Path
) -> None:
    quiet = [output.token_ids for output in llm.generate([PROMPT] * 3, GREEDY, adapter=["a", None, "b"])]
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in adapters["a"].iterdir():
        (broken / file.name).write_bytes(
            file.read_bytes()[:-10] if file.suffix == ".safetensors" else file.read_bytes()
        )
    streams = [llm.stream(PROMPT, GREEDY, adapter=name) for name in ("a", None, "b")]
    first = [next(stream) for stream in streams]
    llm.add_adapter("more", adapters["sees"])
    with pytest.raises(AdapterError, match="truncated"):
        llm.add_adapter("broken", broken)
    with pytest.raises(AdapterError, match="'a' is already there"):
        llm.add_adapter("a", adapters["b"])
    with pytest.raises(AdapterError, match="a name is 1 to 128 letters"):
        llm.add_adapter("..", adapters["b"])
    rest = [list(stream) for stream in streams]
    told = [
        (*one.token_ids, *(t for delta in more for t in delta.token_ids)) for one, more in zip(first, rest, strict=True)
    ]
    assert told == quiet
    llm.remove_adapter("more")


def test_an_adapter_that_does_not_fit_is_refused_when_the_model_is_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is no adapter"):
        LLM(tiny_folder, adapters={"x": tmp_path}, **OPTIONS)
    with pytest.raises(AdapterError, match="a name is 1 to 128 letters"):
        LLM(tiny_folder, adapters={"..": tmp_path}, **OPTIONS)
