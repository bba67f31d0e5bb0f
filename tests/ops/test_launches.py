"""Kernels that are compiled ahead, in other processes, are those that a launch finds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from spyglass.ops.launches import Kernel, compile_kernels, pretended, recorded
from tests.ops.triton_lane import meta

pytest.importorskip("triton", reason="the development set-up installs Triton")


def launch() -> None:
    """An op that launches two different kernels, one of them twice."""
    from spyglass.ops.cache_write.triton import cache_write
    from spyglass.ops.rms_norm.triton import rms_norm

    for rows in (3, 5):
        cache_write(meta(9, 64, 512), meta(rows, 512), meta(rows, dtype=torch.int64))
    rms_norm(meta(5, 512), meta(512, dtype=torch.float32), eps=1e-6)


def test_launches_are_counted_and_neither_compiled_nor_made() -> None:
    with torch.inference_mode(), recorded(90) as kernels:
        launch()
    assert sorted(kernels.values()) == [1, 2]
    assert Counter(kernel.name for kernel in kernels)["write_row"] == 1


def test_what_was_compiled_before_is_recorded_all_the_same() -> None:
    counts = []
    for _ in range(2):
        with torch.inference_mode(), recorded(80) as kernels:
            launch()
        counts.append(kernels)
        with pretended(80):
            for kernel in kernels:
                kernel.compile()
    assert counts[0] == counts[1]


def test_another_process_leaves_what_a_launch_looks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    with torch.inference_mode(), recorded(86) as kernels:
        launch()
    compile_kernels(kernels, 86, processes=2)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert sum(path.suffix == ".cubin" for path in made) == len(kernels)
    with pretended(86):
        for kernel in kernels:
            assert kernel.compile().metadata.name == kernel.name
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert after == made, "compiled again"


def test_a_kernel_that_cannot_be_compiled_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with torch.inference_mode(), recorded(90) as kernels:
        launch()
    sound = next(iter(kernels))
    compile_kernels([Kernel("spyglass.ops.rms_norm.triton_kernel", "no_such_kernel", "{}"), sound], 90, processes=1)
    assert [path.stem for path in tmp_path.rglob("*.cubin")] == [sound.name]
    assert "could not compile" in caplog.text
