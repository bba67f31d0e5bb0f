"""What `spyglass check` says of memory and speed: what fits where, which is counted, and what runs, which was tried."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from spyglass.plan import CONVERSATION
from spyglass.progress import shown_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spyglass.checkpoint.match import Source
    from spyglass.config import ModelConfig

_SEVERAL = "have not been run by us: --tensor-parallel-size is written for them and tested on processors"
_CONTEXT = 4096  # tokens behind which a step is counted
_READ = 64 << 20  # bytes that a thread reads at a time when memory is timed
_TIMES = 4
# Of an 8-layer model of packed weights, one answer at a time: log.md, "Speed on a CPU" and "Packed weights with AVX2".
_SHARES = "of that a larger model reached 73 to 79 % with AVX512-BF16 and 88 % with AVX2"


def speed_here(config: ModelConfig, sources: Mapping[str, Source], stored_rows: bool) -> dict[str, float]:
    """What this machine's processors read per second, measured now; what a token reads; what that allows at most."""
    from dataclasses import replace

    from spyglass.params.table import param_table
    from spyglass.placement import ExpertPlacement, decode_reads

    text = config.text
    here = ExpertPlacement(host=(), layers=text.num_hidden_layers, host_bytes=0, device_bytes=0, place_bytes=0)
    reads = replace(decode_reads(sources, param_table(config), here), stored_rows=stored_rows)
    token, _ = reads.of_step(text, 1, _CONTEXT)
    rate = read_rate()
    return {"bytes_per_second": rate, "token_bytes": token, "tokens_per_second": rate / token}


def read_rate() -> float:
    """Bytes per second that all processors together read: the best of a few times, in tenths of a second."""
    import numpy as np

    from spyglass.machine import usable_cores

    threads = usable_cores().threads
    parts = [np.zeros(_READ // 4, np.float32) for _ in range(threads)]
    for part in parts:
        part += 1  # pages that were never written are not in memory
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_TIMES):
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, threads * _READ / (time.perf_counter() - began))
    return best


def _speed(speed: dict[str, float]) -> str:
    return (
        f"speed: a token reads {shown_bytes(int(speed['token_bytes']))}, at {speed['bytes_per_second'] / 1e9:.0f} GB/s "
        f"(measured now) at most {speed['tokens_per_second']:,.0f} tokens/s for one answer; {_SHARES}"
    )


def _runs(report: dict[str, Any], fit: dict[str, Any]) -> str:
    """Whether what fits also runs, as far as is known."""
    if fit["count"] > 1:
        return f"runs: several GPUs {_SEVERAL}"
    known = next((known for name, known in report["gpu_kernels"].items() if name.startswith(fit["name"])), None)
    if known is not None:
        return f"runs: yes, on Triton kernels ({known})" if known == "measured" else f"runs: not known, kernels {known}"
    if report["no_cpu_kernels"] is not None:
        return f"runs: yes, on the reference ops, which are slow ({report['no_cpu_kernels']})"
    return "runs: yes, on compiled kernels"


def plan_lines(report: dict[str, Any]) -> list[str]:
    """What the weights take, what fits where, and what of it runs."""
    memory = report["memory"]
    loaded = [share for name, share in memory["weights"].items() if name != "engram"]
    stored, expanded = sum(share["stored"] for share in loaded), sum(share["expanded"] for share in loaded)
    tables = memory["weights"]["engram"]["stored"]
    lines = [
        f"weights: {shown_bytes(stored)} as stored, {shown_bytes(expanded)} widened to bfloat16; a step of 2,048 "
        f"tokens about {shown_bytes(memory['step_bytes'])}",
        _cache(memory),
    ]
    if memory["adapter_bytes"]:
        lines.append(f"adapters: {shown_bytes(memory['adapter_bytes'])} beside the weights, the same on every device")
    if tables:
        lines.append(
            f"engram tables: {shown_bytes(tables)}, left in their files (--engram mmap), or one copy in a machine's "
            "memory (host), or beside the weights on its first GPU (device)"
        )
    where = {"none": "", "files": ", tables in files", "host": ", tables in memory", "devices": ", tables on the GPUs"}
    for place, fit in enumerate(memory["here"]):
        lines.append(f"{_times(fit)}{fit['name']}{_ranks(fit)}{where[fit['tables']]}: {_verdict(fit)}")
        if fit["context"]:
            lines.append(f"  {_runs(report, fit)}")
        if fit["context"] and place == 0 and report["speed"]:
            lines.append(f"  {_speed(report['speed'])}")
    least, trained = shown_bytes(memory["processor_bytes"]), shown_bytes(memory["training_bytes"])
    lines.append(
        f"a machine without a GPU needs {least} of free memory, and half a GB for PyTorch; fine-tuning an adapter "
        f"by the defaults takes about {trained} of it or of a GPU"
    )
    title = "context that fits beside the weights, by GPU memory and count"
    lines.append(f"on GPUs elsewhere: one runs (measured on an H200); several, where the model fits, {_SEVERAL}")
    if not tables:
        return lines + _gpu_table(memory["gpus"], f"{title}:")
    lines += _gpu_table(memory["gpus"], f"{title}, engram tables in files or host memory:")
    return lines + _gpu_table(memory["gpus_with_tables"], f"{title}, engram tables on the GPUs:")


def _cache(memory: dict[str, Any]) -> str:
    """What rows take, by kind of device where they differ."""
    names = {"packed": "rows as the model rounds them"}
    places = {"cpu": "on a processor", "cuda": "on a GPU"}
    told: dict[str, list[str]] = {}
    for kind, rows in memory["rows"].items():
        told.setdefault(rows, []).append(places[kind])
    parts = []
    for rows, where in told.items():
        size = memory["cache"][rows]
        place = f" {where[0]}" if len(told) > 1 else ""
        parts.append(
            f"{size['per_token']:,.0f} bytes per token and {size['fixed'] / 1e6:.1f} MB per sequence{place} "
            f"({names.get(rows, rows)})"
        )
    return f"cache: {', '.join(parts)}"


def _times(fit: dict[str, Any]) -> str:
    return f"{fit['count']} x " if fit["count"] > 1 else ""


def _ranks(fit: dict[str, Any]) -> str:
    return f" (--tensor-parallel-size {fit['count']})" if fit["count"] > 1 else ""


def _gpu_table(fits: list[dict[str, Any]], title: str) -> list[str]:
    """Rows = card sizes, columns = how many of them; a cell is the context that fits beside the weights."""
    contexts = {fit["context"] for fit in fits}
    if len(contexts) == 1 and 0 not in contexts:
        return [f"{title} {_tokens(contexts.pop())} tokens everywhere, from one of {fits[0]['name']} on"]
    counts = sorted({fit["count"] for fit in fits})
    cells = {(fit["name"], fit["count"]): _tokens(fit["context"]) for fit in fits}
    lines = [title]
    lines.append(f"  {'':<8}" + "".join(f"{count:>8} x" for count in counts))
    for name in dict.fromkeys(fit["name"] for fit in fits):
        lines.append(f"  {name:<8}" + "".join(f"{cells[name, count]:>10}" for count in counts))
    return lines


def _verdict(fit: dict[str, Any]) -> str:
    each = " on each" if fit["count"] > 1 else ""
    sizes = f"{shown_bytes(fit['weights'])} of weights{each}, {shown_bytes(fit['usable'])} usable"
    return (
        f"fits, with room for {_tokens(fit['context'])} tokens, or {fit['conversations']:,} conversations of "
        f"{_tokens(CONVERSATION)} at once ({sizes})"
        if fit["context"]
        else f"does not fit ({sizes})"
    )


def _tokens(count: int) -> str:
    return f"{count // 1024}k" if count else "-"
