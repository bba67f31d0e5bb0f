"""Whether an adapter fits a model, loaded or on disk. Everything is checked before anything changes."""

from __future__ import annotations

from spyglass.checkpoint.safetensors import list_names
from spyglass.config.training import MAX_FACTOR
from spyglass.errors import AdapterError
from spyglass.lora.low_rank import AdapterFile, LowRank
from spyglass.params.table import ParamTable

MAX_RANK = 512  # what banks accept; ranks above it are full matrices in disguise
MIN_ALPHA, MAX_ALPHA = 1e-12, MAX_FACTOR


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
    absent = [name for name in adapter.modules if name not in params or params[name].adapter is None]
    if absent:
        count = len(adapter.modules)
        raise AdapterError(
            f"{count - len(absent)} of {count} modules of the adapter matched, and an adapter is used "
            f"wholly or not at all; this model has no {list_names(absent)}"
        )
    misfits = [_misfit(name, pair, *params[name].map_shape) for name, pair in adapter.modules.items()]
    found = [text for text in misfits if text is not None]
    found += [
        f"{layer} has {num_experts} experts, the adapter {count}"
        for layer, count in adapter.stacked.items()
        if count != num_experts
    ]
    if found:
        raise AdapterError(f"the adapter was made for another model: {list_names(found)}")
    rank, name = max((pair.rank, name) for name, pair in adapter.modules.items())
    if rank > max_rank:
        raise AdapterError(f"{name} has rank {rank}, the limit is {max_rank}; raise it or train a smaller one")


def _misfit(name: str, pair: LowRank, groups: int, inner: int, outer: int) -> str | None:
    rows = (pair.rank, groups * pair.rank)  # an A that all groups share, or one for each
    if pair.a_RI.shape[1] == inner and len(pair.b_OR) == outer and len(pair.a_RI) in rows:
        return None
    return (
        f"{name} is {outer} x {inner}{f' in {groups} groups' if groups > 1 else ''}, the adapter's A "
        f"{list(pair.a_RI.shape)} and B {list(pair.b_OR.shape)}"
    )
