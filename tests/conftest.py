"""Set-up that every test shares: threads, marks, poisoned memory, deterministic fuzzing."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch loads: workers share the cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
for variable in [name for name in os.environ if name.startswith("SPYGLASS_")]:
    del os.environ[variable]  # a developer's own settings must not decide whether tests pass
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub
os.environ["SPYGLASS_GRAMMAR_SECONDS"] = "600"  # nor may the speed of this machine
os.environ["SPYGLASS_NUMBERS"] = (
    "off"  # a second for each model that is loaded; tests/unit/engine/test_numbers.py has it on
)

ROOT = Path(__file__).resolve().parent.parent
GPU_ONLY = "gpu"

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "spyglass", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("spyglass")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.option.markexpr == GPU_ONLY and not _has_gpu():
        raise pytest.UsageError("-m gpu was asked for, but torch sees no accelerator: every test would be skipped")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, leave out files that import what this machine lacks: it need not have every dev tool."""
    if config.option.markexpr != GPU_ONLY or not collection_path.name.startswith("test_"):
        return None
    tree = ast.parse(collection_path.read_text(encoding="utf-8"))
    imports = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    imports += [node.module for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    roots = {name.partition(".")[0] for name in imports}
    return True if any(importlib.util.find_spec(root) is None for root in roots) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("gpu" in item.keywords for item in items) or _has_gpu():
        return
    skip = pytest.mark.skip(reason="no accelerator on this machine")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors, also those made inside compiled kernels, hold NaN (or the largest integer) until written."""
    import torch

    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(autouse=True)
def _poison_op_tests(request: pytest.FixtureRequest) -> None:
    """Every test under tests/ops runs with poisoned memory."""
    if (ROOT / "tests" / "ops") in request.path.parents:
        request.getfixturevalue("poisoned_memory")


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of test vectors; origin in tests/golden/PROVENANCE.md."""
    return ROOT / "tests" / "golden" / "data"


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint_of(preset, seed=0)`: a folder of `new_checkpoint`, made once for all workers, only to be read."""
    from spyglass.checkpoint.random import new_checkpoint

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

    def made(preset: str, *, seed: int = 0, **options: Any) -> Path:
        about = "-".join(["checkpoint", preset, str(seed), *(f"{key}={value}" for key, value in options.items())])
        (shared / about).mkdir(exist_ok=True)
        folder, done = shared / about / preset, shared / about / "done"
        with (shared / about / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                new_checkpoint(folder, preset, seed=seed, **options)  # type: ignore[arg-type]
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def tiny_folder(checkpoint_of: Callable[..., Path]) -> Path:
    """A checkpoint of preset `tiny` with its tokenizer."""
    return checkpoint_of("tiny")
