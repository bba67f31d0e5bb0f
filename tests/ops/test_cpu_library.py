"""How the compiled library is found, built, refused and loaded."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from spyglass.errors import DeviceError
from spyglass.ops import build, native
from spyglass.ops.experts_grouped import cpu
from spyglass.ops.linear_block.cpu import linear_block
from spyglass.ops.rms_norm.cpu import rms_norm
from spyglass.ops.table import bind_ops, describe
from spyglass.quant.codec import encode
from spyglass.quant.formats import BF16
from tests.ops.cpu_kernels import kernels


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without compiler and with an empty cache."""
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_one_openmp_library_serves_torch_and_the_kernels() -> None:
    """Two would start two sets of threads on the same cores."""
    kernels(build.isas()[0])
    maps = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    assert len([path for path in maps if "gomp" in Path(path).name or "iomp" in Path(path).name]) == 1


def test_a_gradient_is_refused_and_not_silently_zero() -> None:
    x, weight = torch.randn(2, 8, requires_grad=True), encode(torch.randn(3, 8), BF16)
    with pytest.raises(DeviceError, match="rms_norm has no backward"):
        rms_norm(x, None, eps=1e-6)
    with pytest.raises(DeviceError, match="linear_block has no backward"):
        linear_block(x, weight)
    with pytest.raises(DeviceError, match="no backward"):
        linear_block(x.detach(), weight, addend_TO=torch.zeros(2, 3, requires_grad=True))
    with torch.no_grad():
        assert linear_block(x, weight).shape == (2, 3)


def test_other_dtypes_are_refused_by_name() -> None:
    with pytest.raises(DeviceError, match=r"not torch\.float16"):
        rms_norm(torch.ones(1, 8, dtype=torch.float16), None, eps=0.0)
    assert not build.usable("cpu", "float16") and not build.usable("cuda", "float32")


def test_without_a_compiler_the_reference_runs_and_the_reason_is_told(
    no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert "no C++ compiler was found" in (build.why_not() or "")
    assert not build.usable("cpu", "float32")
    assert set(describe("cpu", "float32").values()) == {"reference"}
    assert bind_ops("cpu", "bfloat16").chosen["linear_block"] == "reference"
    assert "slow reference ops run here: no C++ compiler was found" in caplog.text
    assert build.main() == 0, "set-up goes on without kernels"


@pytest.mark.parametrize("which", ["reference", "training"])
def test_ops_that_need_no_kernels_build_none_and_miss_none(
    which: Literal["reference", "training"], no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert set(bind_ops("cpu", "float32", which).chosen.values()) <= {"reference", which}
    assert not caplog.text


def test_a_choice_of_ops_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DeviceError, match="ops='fast' is not known"):
        describe("cpu", "float32", "fast")  # type: ignore[arg-type]


def test_a_failing_compiler_is_remembered_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "g++"
    script.write_text("#!/bin/sh\necho 'this compiler is broken' >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(build, "find_compiler", lambda: str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    isa = build.isas()[0]
    assert build.usable("cpu", "float32"), "nothing is compiled to answer this"
    assert bind_ops("cpu", "float32").chosen["rms_norm"] == "reference"
    assert "building the CPU kernels" in caplog.text and "slow reference ops" in caplog.text
    assert "this compiler is broken" in (build.why_not() or "")
    assert not build.usable("cpu", "float32")
    with pytest.raises(DeviceError, match="did not compile"):
        build.build(isa)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(DeviceError, match="no such-isa"):
        native.kernels_for("such-isa")


def test_importing_an_op_builds_nothing(tmp_path: Path) -> None:
    program = (
        "import importlib, pathlib\n"
        "from spyglass.ops.table import OPS\n"
        "for op in OPS:\n"
        "    folder = pathlib.Path('spyglass/ops') / op\n"
        "    if (folder / 'cpu.py').exists():\n"
        "        assert importlib.import_module(f'spyglass.ops.{op}.cpu').usable('cpu', 'float32') in (True, False)\n"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, env=environment)
    assert not list(tmp_path.rglob("*.so"))


def test_tiles_are_used_only_where_the_system_lets_a_process_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = "f bw dq vl _bf16 vbmi".split()
    everything = frozenset([*(f"avx512{name}" for name in names), "avx2", "fma", "amx_tile", "amx_bf16"])
    monkeypatch.setattr(build, "processor_flags", lambda: everything)
    for allowed, best in ((True, "amx_bf16"), (False, "avx512_bf16")):
        monkeypatch.setattr(build, "tiles_allowed", lambda allowed=allowed: allowed)
        assert build.isas()[0] == best


def test_a_call_in_words_is_the_call() -> None:
    """As a GPU's driver makes it: a C function and the address of its words."""
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(3, 64, generator=generator), torch.rand(3, 2, generator=generator)
    ids = torch.tensor([[0, 3], [-1, 1], [2, 0]], dtype=torch.int32)
    w1, w3, w2 = (encode(torch.randn(4, 64, 64, generator=generator), BF16) for _ in range(3))
    expected = cpu.experts_grouped(x, ids, weights, w1, w3, w2, limit=2.0)
    out = torch.full_like(x, float("nan"))
    given = cpu.arguments(
        x, ids, weights, w1, w3, w2, out, limit=2.0, rounding=None, adapter_T=None, adapters=None, threads=1
    )
    words: list[int] = []
    native.append_words(words, native.best(), "experts", given)
    tape = np.array(words, np.uint64)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(native.best().replay_one)(tape.ctypes.data)
    assert torch.equal(out, expected)
