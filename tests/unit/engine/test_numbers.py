"""Numbers are compared before anyone is served: a broken kernel is found, told, and not used (I1)."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spyglass.checkpoint.random import new_checkpoint
from spyglass.cli.main import main
from spyglass.cli.serve import banner
from spyglass.config.server import ServerConfig
from spyglass.engine.llm import LLM
from spyglass.engine.request import SamplingParams
from spyglass.errors import DeviceError
from spyglass.layers.hosted import HostSide
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.lora.write import write_adapter
from spyglass.ops.table import describe
from spyglass.server.app import describe as describe_health
from spyglass.server.app import served_by

HAS_KERNELS = describe("cpu", "bfloat16")["rms_norm"] == "cpu"
pytestmark = pytest.mark.skipif(
    not HAS_KERNELS, reason="no compiled kernels here, and references agree with themselves"
)
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "max_sequences": 2, "cache_bytes": 120 << 20}
Break = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def folder(tiny_folder: Path) -> Path:
    return tiny_folder


@pytest.fixture(scope="module")
def folder_v41(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("numbers") / "tiny-v41"
    new_checkpoint(path, "tiny-v41")
    return path


def plant(monkeypatch: pytest.MonkeyPatch, op: str, broken: Break) -> list[str]:
    """Let the compiled kernel of an op give something else; the list gets a word for each call."""
    calls: list[str] = []
    module = importlib.import_module(f"spyglass.ops.{op}.cpu")
    sound = getattr(module, op)

    def wrong(*args: Any, **options: Any) -> Any:
        calls.append(op)
        out = sound(*args, **options)
        if isinstance(out, tuple):
            return (broken(out[0]), *out[1:])
        return broken(out)

    monkeypatch.setattr(module, op, wrong)
    return calls


def zeroed(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


def last_row_twice(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[-1] = 2 * x[-1]
    return x


def raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("illegal instruction")


def answer(llm: LLM) -> None:
    llm.generate([[0, 5, 9, 200, 31], [0, *range(100, 150)]], SamplingParams(max_tokens=4, temperature=0.0))


@pytest.mark.parametrize("family", ["folder", "folder_v41"])
def test_sound_kernels_agree_and_every_op_of_the_model_is_compared(family: str, request: pytest.FixtureRequest) -> None:
    llm = LLM(request.getfixturevalue(family), **OPTIONS, numbers="strict")
    assert llm.numbers is not None and not llm.numbers.mismatches
    assert {"linear_block", "sparse_attention", "experts_grouped", "router_topk", "cache_write"} <= set(
        llm.numbers.compared
    )
    assert "cpu" in llm.loaded.model.options.build.ops.chosen.values()


WRONG: dict[str, tuple[str, Break]] = {
    "attention that gives nothing (I1)": ("sparse_attention", zeroed),
    "products that are a tenth too large": ("linear_block", lambda x: 1.1 * x),
    "norms of which one row is wrong": ("rms_norm", last_row_twice),
    "experts that are no numbers": ("experts_grouped", lambda x: x / 0),
    "a router that counts from one": ("router_topk", lambda ids: ids.roll(1, -1) if ids.shape[-1] > 1 else ids + 1),
    "a kernel that breaks": ("swiglu", raises),
    "half of the channels": ("linear_grouped", lambda x: torch.where(torch.arange(x.shape[-1]) % 2 == 0, x, 0)),
    "the second best": ("linear_argmax", lambda ids: ids + 1),
}


@pytest.mark.parametrize("case", WRONG)
def test_i1_an_op_whose_numbers_are_wrong_runs_by_its_reference(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    op, broken = WRONG[case]
    calls = plant(monkeypatch, op, broken)
    llm = LLM(folder, **OPTIONS, numbers="on")
    assert llm.numbers is not None and [one.op for one in llm.numbers.mismatches] == [op]
    assert llm.loaded.model.options.build.ops.chosen[op] == "reference"
    assert f"WRONG NUMBERS, so the slow reference runs in their place: {op} (cpu)" in caplog.text
    calls.clear()
    answer(llm)
    assert not calls


@pytest.mark.parametrize("family", ["folder", "folder_v41"])
def test_i1_strict_refuses_to_start_and_off_does_not_look(
    family: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "sparse_attention", zeroed)
    path = request.getfixturevalue(family)
    with pytest.raises(DeviceError, match=r"sparse_attention \(cpu\): off by 100%.*--numbers strict"):
        LLM(path, **OPTIONS, numbers="strict")
    assert LLM(path, **OPTIONS, numbers="off").numbers is None


def test_i1_what_is_written_into_an_argument_is_compared_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spyglass.ops.cache_write.cpu.cache_write", lambda *args, **options: None)
    report = LLM(folder, **OPTIONS, numbers="on").numbers
    assert report is not None and [one.op for one in report.mismatches] == ["cache_write"]


def test_i1_captured_steps_that_compute_something_else_are_not_replayed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spyglass.runtime import cpu_graph

    sound = cpu_graph.capture

    def wrong(run: Any, lasting: Any) -> Any:
        graph = sound(run, lasting)
        graph.outputs[0].zero_()
        return graph

    monkeypatch.setattr(cpu_graph, "capture", wrong)
    llm = LLM(folder, **OPTIONS, numbers="on")
    assert llm.numbers is not None and [one.op for one in llm.numbers.mismatches] == ["the whole path"]
    assert set(llm.loaded.model.options.build.ops.chosen.values()) == {"reference"}
    assert llm.loaded.model.capture_backend == "eager"


def test_i1_kernels_of_adapters_are_compared_where_there_are_adapters(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, "lora_delta", zeroed)
    report = LLM(folder, **OPTIONS, numbers="on").numbers
    assert report is not None and not report.mismatches
    pair = LowRank(a_RI=torch.ones(4, 128), b_OR=torch.ones(128, 4), alpha=1.0)
    write_adapter(tmp_path / "own", AdapterFile(modules={"layers.1.attn.wq_a": pair}), base_model="tiny")
    report = LLM(folder, **OPTIONS, numbers="on", adapters={"own": tmp_path / "own"}).numbers
    assert report is not None and [one.op for one in report.mismatches] == ["lora_delta"]


def test_i1_health_banner_and_check_name_what_differs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(folder), "--numbers", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["numbers"]["agree"] is True
    plant(monkeypatch, "sparse_attention", zeroed)
    llm, config = LLM(folder, **OPTIONS, numbers="on"), ServerConfig()
    health = describe_health(llm, served_by(llm, config))
    assert health["numbers"]["mismatches"] == ["sparse_attention (cpu): off by 100%"]
    assert health["ops"]["sparse_attention"] == "reference"
    assert "WRONG NUMBERS" in banner(llm, config, 80, 1)
    assert main(["check", str(folder), "--numbers"]) == 1
    assert "numbers: WRONG NUMBERS" in capsys.readouterr().out


DIVIDED: dict[str, Any] = {**OPTIONS, "tensor_parallel_size": 2}
ZEROED_ON_RANK_1 = """
import sys
if "spyglass.engine.rank" in sys.orig_argv:
    from spyglass.ops.sparse_attention import cpu
    sound = cpu.sparse_attention
    cpu.sparse_attention = lambda *args, **options: 0 * sound(*args, **options)
"""


def test_i1_every_process_of_a_divided_model_compares_its_own_ops_and_one_decision_holds_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sound = LLM("spyglass-tiny-v41", **DIVIDED, numbers="strict")
    assert sound.numbers is not None and not sound.numbers.mismatches
    alone = LLM("spyglass-tiny-v41", **OPTIONS, numbers="strict").numbers
    assert alone is not None
    twice = sound.numbers.compared
    assert set(alone.compared) - set(twice) == {"add_shared"}, "parts of a divided model are added up by their group"
    assert sum(twice.values()) > sum(alone.compared.values()), "those of both processes"
    sound.close()
    (tmp_path / "sitecustomize.py").write_text(ZEROED_ON_RANK_1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    with pytest.raises(DeviceError, match=r"sparse_attention \(cpu\): off by 100% on rank 1"):
        LLM("spyglass-tiny-v41", **DIVIDED, numbers="strict")
    llm = LLM("spyglass-tiny-v41", **DIVIDED, numbers="on")
    assert llm.numbers is not None and [one.op for one in llm.numbers.mismatches] == ["sparse_attention"]
    assert "WRONG NUMBERS" in caplog.text
    assert llm.loaded.model.options.build.ops.chosen["sparse_attention"] == "reference"
    assert llm.ranks is not None and len(llm.ranks.pids) == 1, "those that were compared first have ended"
    answer(llm)
    llm.close()


def test_i1_kernels_of_experts_in_host_memory_are_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = LLM(folder, **OPTIONS, experts="host", numbers="on")
    assert sound.numbers is not None and not sound.numbers.mismatches
    right = HostSide.trial
    monkeypatch.setattr(HostSide, "trial", lambda side: (lambda pair: pair and (2 * pair[0], pair[1]))(right(side)))
    llm = LLM(folder, **OPTIONS, experts="host", numbers="on")
    assert llm.numbers is not None and "experts in host memory" in str(llm.numbers)
    assert llm.loaded.model.options.build.host.reference
