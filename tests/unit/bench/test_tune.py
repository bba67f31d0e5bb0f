"""The tuner: what it tries, what it believes, and that launch code uses what it writes. Times come from outside."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from spyglass.bench.launch_choices import Work
from spyglass.bench.tune import Trial, best_of, compile_launches, make_table, report, run, tune, works_of_preset
from spyglass.ops import tuned
from spyglass.ops.launches import recorded
from spyglass.ops.linear_block.triton import Few
from spyglass.quant.formats import fp8
from spyglass.quant.packed import empty_packed

CPU, META = torch.device("cpu"), torch.device("meta")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="launches are those of Triton")


def work(results: dict[Any, Any], tolerance: float = 1e-3) -> Work:
    """A call of rows that gives `results` by launch; an exception is raised."""

    def call(launch: Any, given: Any) -> torch.Tensor:
        if isinstance(results[launch], Exception):
            raise results[launch]
        return torch.tensor([results[launch], 2.0])

    return Work(
        table="some_op",
        shape="out=3 in=4",
        rows=8,
        launches=tuple(results),
        inputs=lambda device: [((), {}), ((), {})],
        run=call,
        tolerance=tolerance,
    )


class Clock:
    """Takes the time of a launch from a table instead of from a GPU."""

    def __init__(self, us: dict[Any, float]) -> None:
        self.us, self.asked = us, list[Any]()

    def __call__(self, calls: Sequence[Callable[[], object]]) -> float:
        assert len(calls) == 2 and all(isinstance(call, partial) for call in calls)
        self.asked.append(calls[0].args[0])  # type: ignore[attr-defined]
        return self.us[self.asked[-1]]


FAST, SLOW, OTHER = Few(warps=1), Few(warps=2), Few(warps=4)


def test_the_quickest_right_launch_takes_the_place_of_the_one_in_use() -> None:
    one = work({None: 1.0, FAST: 1.0, SLOW: 1.0, OTHER: 3.0})
    clock = Clock({None: 10.0, FAST: 6.0, SLOW: 11.0, OTHER: 1.0})
    trials = tune([one], CPU, clock)
    assert clock.asked == [None, FAST, SLOW], "a launch with other results is not timed"
    found = best_of(trials, one)
    assert found is not None and (found[0].us, found[1].launch, found[1].us) == (10.0, FAST, 6.0)
    assert "differs by" in trials[-1].failed


def test_a_launch_that_cannot_run_is_reported_and_the_others_are_tried() -> None:
    one = work({None: 1.0, FAST: RuntimeError("out of resource: shared memory"), SLOW: 1.0})
    trials = tune([one], CPU, Clock({None: 10.0, SLOW: 5.0}))
    assert [trial.us for trial in trials] == [10.0, None, 5.0]
    assert any(line.startswith("failed: some_op 8 rows") and "shared memory" in line for line in report(trials))


def test_without_a_result_to_compare_with_nothing_is_tried() -> None:
    one = work({None: RuntimeError("no"), FAST: 1.0})
    trials = tune([one], CPU, Clock({}))
    assert len(trials) == 1 and best_of(trials, one) is None and "not measured" in report(trials)[1]


def test_numbers_that_are_none_are_not_right() -> None:
    one = work({None: 1.0, FAST: float("nan")})
    assert best_of(tune([one], CPU, Clock({None: 2.0, FAST: 1.0})), one) == (Trial(work=one, launch=None, us=2.0),) * 2


def test_little_gain_changes_nothing_and_an_earlier_table_stays() -> None:
    one = work({None: 1.0, FAST: 1.0})
    trials = tune([one], CPU, Clock({None: 10.0, FAST: 9.9}))
    before = {"launches": {"some_op": {"out=3 in=4": {"8": {"launch": "earlier"}}}}}
    assert make_table(trials, before, {"gpu": "a GPU"}) == {"gpu": "a GPU", **before}
    assert make_table(trials, {}, {})["launches"] == {}


def test_no_trial_begins_when_time_is_up() -> None:
    left = iter([True, True, False])
    trials = tune([work({None: 1.0, FAST: 1.0})], CPU, Clock({None: 1.0, FAST: 2.0}), more=lambda: next(left))
    assert len(trials) == 1


def test_buckets_hold_every_number_of_rows_and_are_named_by_one_of_theirs() -> None:
    names = [tuned.bucket(rows) for rows in range(1, 5000)]
    assert names == sorted(names) and set(names) == set(tuned.BUCKETS)
    assert all(tuned.bucket(name) == name for name in tuned.BUCKETS)


@needs_triton
def test_launch_code_uses_the_table_of_its_generation_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spyglass.ops.linear_block.triton import linear_block, measured

    weight = empty_packed(fp8((128, 128)), (256, 1024), "meta")
    x = torch.empty(5, 1024, dtype=torch.bfloat16, device="meta")
    launch = Few(warps=2, steps=2, ahead=True)
    one = replace(
        work({None: 1.0, launch: 1.0}), table="linear_block", shape="weight=fp8128x128 out=256 in=1024 groups=1"
    )
    table = make_table(tune([one], CPU, Clock({None: 3.0, launch: 1.0})), {}, {"gpu": "a GPU"})
    (tmp_path / "90.json").write_text(json.dumps(table), encoding="utf-8")
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    warps = {}
    for generation in (86, 90):
        with torch.inference_mode(), recorded(generation) as kernels:
            assert measured(5, weight, 1) == (launch if generation == 90 else None)
            assert measured(9, weight, 1) is None, "another bucket"
            linear_block(x, weight)
            (kernel,) = [kernel for kernel in kernels if kernel.name == "few_rows"]
            warps[generation] = json.loads(kernel.specialisation)["options"]["num_warps"]
    assert warps == {86: 4, 90: 2}
    assert [tuned.standing(one) for one in ((9, 0), (8, 6), (7, 0))] == ["measured", "compiles, not run", "not known"]


@needs_triton
@pytest.mark.parametrize("preset", ["flash-4layer", "v41-flash"])
def test_every_launch_tried_for_a_released_model_can_be_made(preset: str) -> None:
    works = works_of_preset(preset, [1, 32, 4096], 8192, 90)
    tables = {work.table for work in works}
    assert tables == {
        *("linear_block", "experts_grouped", "sparse_attention", "index_topk", "rms_norm", "row_finish", "swiglu")
    }
    with torch.inference_mode(), recorded(90) as kernels:
        for one in works:
            assert one.launches[0] is None and len(set(one.launches)) == len(one.launches) > 1
            for launch in one.launches:
                one.run(launch, one.inputs(META)[0])
    assert len(kernels) > 50


@needs_triton
def test_kernels_of_all_launches_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "spyglass.bench.tune.compile_kernels", lambda kernels, generation: compiled.append((len(kernels), generation))
    )
    works = [one for one in works_of_preset("tiny", [1], 2048, 80) if one.table == "sparse_attention"]
    compile_launches(works, 80, 108)
    assert works and compiled and compiled[0][0] > 1 and compiled[0][1] == 80


@needs_triton
@pytest.mark.parametrize("table", ["sparse_attention", "index_topk"])
def test_inputs_are_such_that_the_reference_gives_numbers(table: str) -> None:
    """Pages, indices and positions are drawn; a place outside of a page table would raise or give NaN."""
    from spyglass.ops.index_topk.reference import index_topk
    from spyglass.ops.sparse_attention.reference import sparse_attention

    references: dict[str, Callable[..., torch.Tensor]] = {
        "sparse_attention": sparse_attention,
        "index_topk": index_topk,
    }
    works = [one for one in works_of_preset("tiny", [2, 512], 8192, 90) if one.table == table]
    assert works
    for one in works:
        args, options = one.inputs(CPU)[1]
        found = references[table](*args, **options)
        assert torch.isfinite(found.float()).all() and found.float().std() > 0


def test_every_shipped_table_can_be_read() -> None:
    for path in tuned.FOLDER.glob("*.json"):
        held = tuned.table(tuned.FOLDER, int(path.stem))
        assert held["gpu"] and int(path.stem) in tuned.gpu.GENERATIONS
        for shapes in held["launches"].values():
            for rows in shapes.values():
                assert {int(name) for name in rows} <= set(tuned.BUCKETS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run([])
    assert "no CUDA device" in capsys.readouterr().err
