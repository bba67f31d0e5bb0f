"""What `spyglass check` says of experts in host memory: where they would lie, and how fast that can be at most."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from spyglass.progress import shown_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spyglass.checkpoint.match import Source
    from spyglass.config import ModelConfig
    from spyglass.machine import Machine

_CONTEXT = 600 << 20  # bytes that a driver takes of a GPU that nobody uses
_TOKENS = 4096  # behind which a step is counted


def hosted_experts(
    config: ModelConfig, sources: Mapping[str, Source], machine: Machine, adapters: int, *, measures: bool
) -> list[dict[str, Any]]:
    """Where experts lie beside one GPU that has no room for all: this machine's first, or one of each common size.

    With the bytes that a token reads on both sides and, where bandwidths are measured, what they allow.
    """
    from spyglass.config.engine import EngineConfig
    from spyglass.errors import CapacityError
    from spyglass.machine import Device
    from spyglass.params.table import param_table
    from spyglass.placement import StepRates, decode_reads, place_model
    from spyglass.plan import GIB, GPU_SIZES

    sizes = [Device(f"{size} GB", size * GIB, size * GIB - _CONTEXT) for size in GPU_SIZES]
    rows, params, rates = [], param_table(config), None
    for gpu in machine.gpus[:1] or sizes:
        try:
            found = place_model(
                config,
                sources,
                params,
                EngineConfig(experts="auto"),
                free=gpu.free,
                host_free=machine.ram.free if machine.gpus else None,
                adapters=adapters,
            )
        except CapacityError as error:
            if machine.gpus:
                rows.append({"name": gpu.name, "here": True, "context": 0, "missing": str(error)})
            continue
        if not found.host:
            continue
        reads = decode_reads(sources, params, found)
        row = {"name": gpu.name, "here": bool(machine.gpus), "context": 1, **asdict(found)}
        row["token"] = dict(zip(("device", "host"), reads.of_step(config.text, 1, _TOKENS), strict=True))
        if measures and machine.gpus:
            from spyglass.bench.gpu import host_bandwidth, read_bandwidth

            rates = rates or StepRates(device=read_bandwidth(), host=host_bandwidth())
            row["rates"] = asdict(rates)
            row["tokens_per_second"] = {
                batch: batch / rates.seconds(*reads.of_step(config.text, batch, _TOKENS)) for batch in (1, 8, 32)
            }
        rows.append(row)
    return rows


def expert_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The same for people."""
    lines = ["with the experts that do not fit beside one GPU in host memory (--experts auto):"] if rows else []
    for row in rows:
        if "missing" in row:
            lines.append(f"  {row['name']}: {row['missing']}")
            continue
        token = row["token"]
        lines.append(
            f"  {row['name']}: {row['layers'] - len(row['host'])} of {row['layers']} layers' on the GPU, "
            f"{shown_bytes(row['host_bytes'])} in host memory; a token reads {shown_bytes(int(token['device']))} of "
            f"the GPU's and {shown_bytes(int(token['host']))} of the host's"
        )
        if "rates" in row:
            rates = row["rates"]
            allowed = ", ".join(f"{rate:,.0f} ({batch})" for batch, rate in row["tokens_per_second"].items())
            lines.append(
                f"    at {rates['device'] / 1e12:.2f} TB/s and {rates['host'] / 1e9:.0f} GB/s, measured now, at most "
                f"{allowed} tokens/s (requests at once)"
            )
    return lines
