"""A model with its adapters and tables, loaded so that its numbers are those of the reference."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from spyglass.config.engine import EngineConfig, NumbersMode
from spyglass.engine.lead import adapter_banks
from spyglass.engine.load import load_ranks
from spyglass.engine.ranks import Ranks
from spyglass.engine.rehearsal import compile_ahead
from spyglass.engram.feed import EngramFeed
from spyglass.engram.store import open_engram
from spyglass.errors import DeviceError
from spyglass.lora.low_rank import AdapterFile
from spyglass.lora.pool import AdapterPool
from spyglass.model import LoadedModel
from spyglass.numbers import WHOLE_PATH, NumbersReport, compare_ops, compare_path, together
from spyglass.ops.table import OPS


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedParts:
    """What an engine runs: the model, its adapters, and the rows of its engram tables if it has any."""

    loaded: LoadedModel
    lora: AdapterPool
    engram: EngramFeed | None
    ranks: Ranks | None = None  # those that have the other parts of a divided model
    drawn: bool = False  # the weights are random: what they compute means nothing


def load_parts(
    path: Path,
    options: EngineConfig,
    device: torch.device,
    adapters: Mapping[str, AdapterFile],
    progress: bool,
    host_experts: Sequence[int] = (),
    without: Sequence[str] = (),
) -> LoadedParts:
    """Load all of it; ops in `without` run by their reference, experts of `host_experts` layers stay in host memory.

    Raises as `LLM`.
    """
    loaded, ranks = load_ranks(path, options, device, progress=progress, host_experts=host_experts, without=without)
    lora, engram = AdapterPool(loaded.model, banks=adapter_banks(loaded.model, ranks)), None
    for name, file in adapters.items():  # before rows take what memory is left
        lora.attach(name, file)
    if ranks is None:  # else each rank compiles what it launches first
        compile_ahead(loaded, options, adapters=bool(adapters))
    if loaded.config.text.engram is not None:
        store = open_engram(path, loaded.config, placement=options.engram)
        engram = EngramFeed(store, device=loaded.device, dtype=loaded.dtype)
    return LoadedParts(loaded=loaded, lora=lora, engram=engram, ranks=ranks, drawn=options.load == "dummy")


def load_checked(
    load: Callable[[Sequence[str]], LoadedParts], mode: NumbersMode
) -> tuple[LoadedParts, NumbersReport | None]:
    """Parts whose ops all agree with their references: `load(without)` is called again without those that do not.

    What differs in one process of a divided model runs by its reference in all of them.

    Raises:
        DeviceError: something differs, and the mode is "strict".
        RankError: a process of a divided model failed.
    """
    parts = load(())
    if mode == "off" or parts.drawn:
        return parts, None
    report = _compare(parts)
    if not report.mismatches:
        return parts, report
    if parts.ranks is not None:
        parts.ranks.close()
    if mode == "strict":
        raise DeviceError(
            f"numbers differ from the reference: {report.differences()}; rebuild the kernels, look at the driver, or "
            "start without --numbers strict to run the reference in their place"
        )
    logging.getLogger(__name__).error("%s", report)
    del parts
    gc.collect()
    wrong = {one.op for one in report.mismatches}
    return load(OPS if WHOLE_PATH in wrong else sorted(wrong)), report


def _compare(parts: LoadedParts) -> NumbersReport:
    """All ops, and, if they agree, the whole path."""
    ops = _on_all_ranks(parts, compare_ops)
    if ops.mismatches:
        return ops
    path = _on_all_ranks(parts, compare_path)
    return NumbersReport(mismatches=path.mismatches, compared=ops.compared, seconds=ops.seconds + path.seconds)


def _on_all_ranks(
    parts: LoadedParts, work: Callable[[LoadedModel, EngramFeed | None, Sequence[int]], NumbersReport]
) -> NumbersReport:
    adapter_ids, ranks = tuple(parts.lora.adapter_ids()), parts.ranks
    if ranks is None:
        return work(parts.loaded, parts.engram, adapter_ids)
    with ranks.turn():
        ranks.send("compare", work, adapter_ids)
        own = work(parts.loaded, parts.engram, adapter_ids)
        return together([own, *ranks.answers()])
