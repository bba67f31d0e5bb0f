"""An adapter in memory: one low-rank pair per native module, as files hold them and banks take them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from spyglass.params.declared import AdapterGroup
from spyglass.params.targets import VISION_GROUPS, count_groups, group_of, split_expert

_ROW_BYTES = 8  # the factor of a rank row and its slot


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """W + scale · B A, scale = alpha / r (alpha / sqrt(r) with `rslora`).

    `a_RI` [r, in], `b_OR` [out, r]. For the block-diagonal `wo_a`, in is that of one group, out that of all groups:
    rows of B belong to their group, A is shared. An A of [groups · r, in] has rows of its own for each group.
    """

    a_RI: torch.Tensor
    b_OR: torch.Tensor
    alpha: float
    rslora: bool = False

    @property
    def rank(self) -> int:
        return self.b_OR.shape[1]

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """A whole adapter by native module name; a routed expert's matrix is a module (`layers.3.ffn.experts.7.w1`).

    `stacked`: how many experts a layer has (`layers.3.ffn.experts`) where the file holds all of them in one tensor.
    """

    modules: Mapping[str, LowRank]
    stacked: Mapping[str, int] = field(default_factory=dict)

    def counts(self) -> dict[AdapterGroup, int]:
        """Modules per group."""
        return count_groups(self.modules)

    def compact(self) -> AdapterFile:
        """The same with tensors that hold nothing else, so that it can be sent."""
        pairs = {
            name: replace(pair, a_RI=pair.a_RI.detach().clone(), b_OR=pair.b_OR.detach().clone())
            for name, pair in self.modules.items()
        }
        return replace(self, modules=pairs)

    def bank_bytes(self) -> int:
        """Memory that its rank rows take: in fp32, for routed experts in the dtype they are stored in.

        With an A for each group of `wo_a`, every rank row of it gets a row of B as long as all outputs.
        """
        return sum(_pair_bytes(pair, split_expert(name) is not None) for name, pair in self.modules.items())

    def digests(self, factor: float = 1.0) -> tuple[bytes, bytes]:
        """What acts on tokens and what acts on images, as hashes of names, values and scales; empty = nothing."""
        seeing = [name for name in sorted(self.modules) if group_of(name) in VISION_GROUPS]
        reading = [name for name in sorted(self.modules) if group_of(name) not in VISION_GROUPS]
        return self._digest(reading, factor), self._digest(seeing, factor)

    def _digest(self, names: Sequence[str], factor: float) -> bytes:
        if not names:
            return b""
        content = hashlib.blake2b(digest_size=32)
        for name in names:
            pair = self.modules[name]
            shapes = (tuple(pair.a_RI.shape), tuple(pair.b_OR.shape), str(pair.a_RI.dtype), str(pair.b_OR.dtype))
            content.update(repr((name, shapes, pair.scale * factor)).encode())
            for tensor in (pair.a_RI, pair.b_OR):
                content.update(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().data)
        return content.digest()


def _pair_bytes(pair: LowRank, as_stored: bool) -> int:
    rows = len(pair.a_RI)
    values = (pair.a_RI.nbytes + pair.b_OR.nbytes) if as_stored else 4 * rows * (pair.a_RI.shape[1] + len(pair.b_OR))
    return values + _ROW_BYTES * rows
