"""How close is close enough: one table. Widening an entry needs a line that says why.

`absolute` and `relative` combine as |actual - expected| <= absolute + relative * |expected|; a `*_OF_MAX` entry bounds
the largest difference divided by the largest expected magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """A bound and the reason for its size."""

    absolute: float
    relative: float = 0.0
    why: str


# Whole models
PLAIN_LOGITS = Tolerance(absolute=1e-4, why="fp32 plain against transformers, logits of standard deviation about 4")
GOLDEN_LOGITS = Tolerance(absolute=5e-4, why="fp32 plain against an engine that sums in another order")
GOLDEN_SPARSE_LOGITS = Tolerance(absolute=2e-3, why="the same with odd constants that amplify")
ROUNDED_LOGITS = Tolerance(absolute=1e-3, why="rounded arithmetic, as long as no code flips")
MERGED_OF_MAX = 5e-5  # an adapter beside its weights = merged into them: every merged weight is rounded once more
LAW_OF_MAX = 1e-5  # chunked = whole, batched = alone, fp32 plain: the same sums in another order
# of an op in bf16, of the largest: inputs and what lies between products are rounded to 8 bits, and sums may turn a tie
ROUNDED_GRADIENT_OF_MAX = 2e-2
GRADIENT_OF_MAX = 1e-3  # of a whole model in fp32, the same sums in another order, through nine layers
LOGPROB_LAW = 100 * LAW_OF_MAX  # of log-probabilities, cold or from a cache: logits up to about 10, and their softmax
FLIPPED_OF_MAX = 0.1  # of logits when a code of a rounded row flips somewhere: one step of FP4 in one row of a layer
# root mean square of a difference over that of what is expected, bf16 on a GPU: experts by the kernels of the host
# beside those of the GPU, which round in other orders; and logits, where choices of experts and rows may fall otherwise
HOSTED_OF_RMS, HOSTED_LOGITS_OF_RMS = 0.03, 0.2

# Training
SLOPE_OF_NORM = 1e-6  # finite differences in float64 against a gradient: steps near 1e-7 leave about half the digits
# log-probabilities trained and served as released: share with the same bits, and mean difference of all (0.98, 0.003)
SAME_ROWS, SAME_MEAN = 0.9, 0.02
# direction of gradients in bf16 against fp32 with the same choices and codes, of all and of each kind of leaf: four
# layers of V4 and nine of V4.1 (0.985 and 0.94 found, 0.57 for the worst kind, at the bottom of the tower)
ROUNDED_COSINE, KIND_COSINE = {"v4": 0.95, "v41": 0.85}, 0.4
LOSS_LAW = Tolerance(absolute=1e-6, relative=1e-5, why="fp32 losses, norms and weights: the same sums in another order")
ONE_SUM = Tolerance(absolute=1e-7, relative=1e-6, why="fp32 numbers that are one short sum")
CLIPPED = Tolerance(absolute=0.0, relative=1e-3, why="clipping divides by the norm + 1e-6, here of norms near 1e-3")
TRAINED_APART = Tolerance(
    absolute=1e-3,
    relative=1e-2,
    why="Adam divides by the root of a gradient's square: where that is next to nothing, "
    "the order of its sums decides a share of a step of 0.01",
)
RESTORED_LOSS = Tolerance(
    absolute=0.0,
    relative=2e-2,
    why="bf16 with rounded arithmetic: mean loss of the ops that serve and of those that train",
)
REWRITTEN = Tolerance(absolute=1e-6, relative=1e-5, why="an adapter that was written with its scale moved into B")
LOSS_OF_FORMAT = Tolerance(
    absolute=1e-4, why="relative error of a merge into fp32: steps of 6e-8 beside changes of 0.01"
)

# Ops against the reference in float64
OP_FLOAT32 = Tolerance(absolute=2e-5, relative=2e-5, why="fp32 sums of up to a few thousand terms")
OP_BFLOAT16 = Tolerance(
    absolute=2e-2, relative=1e-2, why="bf16 has 8 significant bits; inputs are rounded once, outputs once"
)

OP_FLIPPED = Tolerance(
    absolute=3e-2, relative=2e-2, why="two roundings in a row: a sum in another order may turn a tie of the second"
)

CUT_PRODUCTS = Tolerance(
    absolute=2e-5,
    why="sums of 16 products of up to 60 times 3, each without about 2^-26 of it",
)

# Parts
VISION_FLOAT32 = Tolerance(absolute=1e-5, relative=1e-5, why="tower and aligner in fp32 against golden vectors")
VISION_BFLOAT16 = Tolerance(absolute=2e-2, relative=2e-2, why="bf16 tower whose kernels may round silu or not")
ROUTER_WEIGHTS = Tolerance(absolute=1e-6, why="fp32 softplus, sqrt and one division")
INDEX_SCORES = Tolerance(absolute=1e-4, why="fp32 scores of 128-wide dot products over 16 heads")
SPEC_PRINTED = Tolerance(absolute=1e-6, relative=2e-6, why="values printed in the specification, six or seven digits")


def assert_close(
    actual: torch.Tensor | Any, expected: torch.Tensor | Any, tolerance: Tolerance, label: str = ""
) -> None:
    """Fail with the worst element and its place; NaN never passes, shapes must agree."""
    got, want = _as_float64(actual), _as_float64(expected)
    assert got.shape == want.shape, f"{label}: shape {got.shape}, expected {want.shape}"
    with np.errstate(invalid="ignore"):  # equal infinities are settled below
        excess = np.abs(got - want) - (tolerance.absolute + tolerance.relative * np.abs(want))
    excess = np.where((got == want), -1.0, np.where(np.isnan(excess), np.inf, excess))
    if excess.size and excess.max() > 0:
        place = np.unravel_index(int(excess.argmax()), excess.shape)
        bad = int((excess > 0).sum())
        raise AssertionError(
            f"{label}: {bad} of {excess.size} elements off; worst at {tuple(int(i) for i in place)}: "
            f"{got[place]!r}, expected {want[place]!r} ({tolerance})"
        )


def assert_same_argmax(logits_TV: torch.Tensor | Any, argmax_T: Any, tolerance: Tolerance, label: str = "") -> None:
    """Every row's best token is the expected one, unless the expected one is closer to the best than the tolerance."""
    logits, expected = _as_float64(logits_TV), np.asarray(argmax_T, np.int64)
    behind = logits.max(axis=-1) - np.take_along_axis(logits, expected[:, None], axis=-1)[:, 0]
    worst = int(behind.argmax())
    assert behind[worst] <= 2 * tolerance.absolute, (
        f"{label}: row {worst} has its best token at {int(logits[worst].argmax())}, expected {expected[worst]}, "
        f"which is {behind[worst]!r} below it"
    )


def assert_law(actual: torch.Tensor | Any, expected: torch.Tensor | Any, label: str = "") -> None:
    """The bound of the equivalence laws: largest difference at most LAW_OF_MAX of the largest expected magnitude."""
    scale = float(np.abs(_as_float64(expected)).max())
    assert_close(actual, expected, Tolerance(absolute=LAW_OF_MAX * scale, why="equivalence law"), label)


def assert_merged(actual: torch.Tensor | Any, expected: torch.Tensor | Any, label: str = "") -> None:
    """The bound of an adapter against the dense-merged model (fp32, plain): MERGED_OF_MAX of the largest magnitude."""
    scale = float(np.abs(_as_float64(expected)).max())
    assert_close(actual, expected, Tolerance(absolute=MERGED_OF_MAX * scale, why="merged into fp32 weights"), label)


def _as_float64(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    detach = getattr(values, "detach", None)
    if detach is not None:
        values = detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64)
