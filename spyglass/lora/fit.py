"""Whether an adapter fits a model, loaded or on disk. Everything is checked before anything changes."""

from __future__ import annotations

from collections.abc import Mapping

from spyglass.checkpoint.safetensors import list_names
from spyglass.config.training import MAX_FACTOR
from spyglass.errors import AdapterError
from spyglass.lora.low_rank import AdapterFile
from spyglass.params.table import ParamTable

MAX_RANK = 512  # what banks accept; ranks above it are full matrices in disguise
MIN_ALPHA, MAX_ALPHA = 1e-12, MAX_FACTOR
PairShape = tuple[tuple[int, int], tuple[int, int]]  # of A [r, in] and B [out, r]


def check_trained(rank: int, alpha: float) -> None:
    """Whether an adapter that is to be trained may have this rank and alpha.

    Raises:
        AdapterError: it may not.
    """
    if not 1 <= rank <= MAX_RANK:
        raise AdapterError(f"rank {rank} is outside 1 to {MAX_RANK}")
    if not MIN_ALPHA <= alpha <= MAX_ALPHA:
        raise AdapterError(f"alpha {alpha} is outside {MIN_ALPHA:g} to {MAX_ALPHA:g}")


def check_alpha(alpha: float) -> float:
    """An alpha, or a factor upon one, that fp32 can multiply with.

    Raises:
        AdapterError: it is no number, or adds nothing or no finite numbers.
    """
    if not MIN_ALPHA <= abs(alpha) <= MAX_ALPHA:  # a NaN is never within
        raise AdapterError(f"it is {str(alpha)[:40]}; its size must be from {MIN_ALPHA:g} to {MAX_ALPHA:g}")
    return float(alpha)


def check_fit(adapter: AdapterFile, params: ParamTable, num_experts: int, max_rank: int = MAX_RANK) -> None:
    """Whether every pair has a module of its shape in the model's table, and a rank within the limit.

    Raises:
        AdapterError: "k of N modules matched" with those that are not there, or the shapes that differ, or both ranks.
    """
    shapes = {name: ((*pair.a_RI.shape,), (*pair.b_OR.shape,)) for name, pair in adapter.modules.items()}
    check_shapes_fit(shapes, adapter.stacked, params, num_experts, max_rank)


def check_shapes_fit(
    shapes: Mapping[str, PairShape],
    stacked: Mapping[str, int],
    params: ParamTable,
    num_experts: int,
    max_rank: int = MAX_RANK,
) -> None:
    """As `check_fit`, of shapes by native module name and of the experts of layers that are stacked.

    Raises:
        AdapterError: as `check_fit`.
    """
    absent = [name for name in shapes if name not in params or params[name].adapter is None]
    if absent:
        count = len(shapes)
        raise AdapterError(
            f"{count - len(absent)} of {count} modules of the adapter matched, and an adapter is used "
            f"wholly or not at all; this model has no {list_names(absent)}"
        )
    misfits = [_misfit(name, shape, *params[name].map_shape) for name, shape in shapes.items()]
    found = [text for text in misfits if text is not None]
    found += [
        f"{layer} has {num_experts} experts, the adapter {count}"
        for layer, count in stacked.items()
        if count != num_experts
    ]
    if found:
        raise AdapterError(f"the adapter was made for another model: {list_names(found)}")
    rank, name = max((b[1], name) for name, (_, b) in shapes.items())
    if rank > max_rank:
        raise AdapterError(f"{name} has rank {rank}, the limit is {max_rank}; raise it or train a smaller one")


def _misfit(name: str, shape: PairShape, groups: int, inner: int, outer: int) -> str | None:
    a, b = shape
    if a[1] == inner and b[0] == outer and a[0] in (b[1], groups * b[1]):  # an A that all groups share, or one for each
        return None
    return (
        f"{name} is {outer} x {inner}{f' in {groups} groups' if groups > 1 else ''}, the adapter's A "
        f"{list(a)} and B {list(b)}"
    )
