"""Which rows a model keeps per sequence, described as data; `engine` allocates them and knows no model.

A *group* is a set of tensors whose rows live and die together and therefore share one page table. Spec v4 4.7 and 5.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spyglass.config.model import Rounding, TextConfig
from spyglass.quant.formats import StoredRow

# Kinds of device whose memory holds rows in the formats they are rounded to: those whose kernels do so, measured
STORED_ON = frozenset({"cpu"})


def stores_rows(numerics: Literal["reference", "plain"], device: str) -> bool:
    """Whether memory on a kind of device holds rows as the codes they are rounded to, and not as activations."""
    return numerics == "reference" and device in STORED_ON


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """One tensor of rows of one layer.

    `group` names the page table ("window", "pool4", "state4", ...). A row stands for `tokens_per_row` tokens.
    `retention`: rows kept behind the newest one when a step starts, None = all. `dtype` "activation" follows the model,
    unless `stored` says which codes hold a row. `snapshot`: whether a resumable prefix must store it.
    """

    group: str
    kind: Literal["window", "pool", "index", "state", "index_state"]
    layer: int
    row_dim: int
    dtype: Literal["activation", "float32"]
    tokens_per_row: int
    retention: int | None
    snapshot: bool
    stored: StoredRow | None = None

    def row_bytes(self, activation: int) -> int:
        """Bytes of a row, of a model whose activations take `activation` bytes each."""
        if self.stored is not None:
            return self.stored.row_bytes
        return self.row_dim * (4 if self.dtype == "float32" else activation)


def cache_plans(text: TextConfig, lookahead: int = 0, *, stored: bool = False) -> tuple[CachePlan, ...]:
    """Every row tensor of the backbone, layer by layer; `stored`: rows lie in the formats that the model rounds to.

    So much is retained that the last `lookahead` tokens of a sequence may be taken back and others run in their place.

    Window rows [D]; pool rows [D] and index keys [I] per KV source; un-pooled (kv, gate) rows in fp32, twice as wide
    where groups overlap (spec v4 5.4). A state group keeps `group_rows` tokens, enough to finish any open group.
    """
    plans: list[CachePlan] = []
    rounding = text.reference_rounding if stored else Rounding()
    for layer in text.layers:
        plans.append(
            CachePlan(
                group="window",
                kind="window",
                layer=layer.index,
                row_dim=text.head_dim,
                dtype="activation",
                tokens_per_row=1,
                retention=text.sliding_window - 1 + lookahead,
                snapshot=True,
                stored=rounding.stored_row("window", text.head_dim),
            )
        )
        compressor = layer.compressor
        if compressor is None:
            continue
        ratio = compressor.ratio
        widths: list[tuple[Literal["pool", "index"], Literal["state", "index_state"], int]] = [
            ("pool", "state", text.head_dim)
        ]
        if compressor.index_keys is not None:
            widths.append(("index", "index_state", text.index_head_dim))
        for pool_kind, state_kind, dim in widths:
            plans.append(
                CachePlan(
                    group=f"pool{ratio}",
                    kind=pool_kind,
                    layer=layer.index,
                    row_dim=dim,
                    dtype="activation",
                    tokens_per_row=ratio,
                    retention=None,
                    snapshot=False,
                    stored=rounding.stored_row(pool_kind, dim),
                )
            )
            if compressor.gated and (pool_kind == "pool" or compressor.index_keys == "compressor"):
                series = 2 if compressor.overlap else 1
                plans.append(
                    CachePlan(
                        group=f"state{ratio}",
                        kind=state_kind,
                        layer=layer.index,
                        row_dim=2 * series * dim,
                        dtype="float32",
                        tokens_per_row=1,
                        retention=compressor.group_rows + lookahead,
                        snapshot=True,
                    )
                )
    return tuple(plans)
