"""Rank rows beside matrices, in products of matrix units; see `triton_training.py` for how fp32 goes through them.

Per matrix g of a batch:  u = scale · (x aᵀ), the addend u b;  du = scale · (g bᵀ), dx = du a, da = duᵀ x, db = uᵀ g.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spyglass.ops.linear_block import triton_training as kernels

ALIGNED = 8  # values: rows that matrix units read begin at multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class LowRank:
    """Rank rows of G matrices, fp32; `scale_GR` contiguous. `adapter_ids`: of N rows and of R ranks (`lora_delta`)."""

    a_GRI: torch.Tensor
    b_GRO: torch.Tensor
    scale_GR: torch.Tensor
    adapter_ids: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def ranks(self) -> int:
        return self.scale_GR.shape[1]

    @property
    def columns(self) -> int:
        """Further columns of the product."""
        return padded(self.ranks * kernels.parts(kernels.LEFT))

    def put_left(self, x_GNI: torch.Tensor, left_GNK: torch.Tensor) -> torch.Tensor:
        """Write u into its columns; returns it whole, fp32 [G, N, R]."""
        return self._scaled(product(x_GNI, each(self.a_GRI, x_GNI.dtype).mT, torch.float32), left_GNK)

    def put_right(self, right_GOK: torch.Tensor) -> None:
        """Write b into its columns."""
        kernels.place_parts(self.b_GRO.mT, columns_of(right_GOK, self.ranks), kernels.RIGHT)

    def gradient(self, grad_GNO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """du: as left columns of a product, and whole, fp32 [G, N, R]."""
        left_GNK = grad_GNO.new_empty(*grad_GNO.shape[:2], self.columns)
        return left_GNK, self._scaled(product(grad_GNO, each(self.b_GRO, grad_GNO.dtype).mT, torch.float32), left_GNK)

    def add_input(self, left_GNK: torch.Tensor, dx_GNI: torch.Tensor) -> None:
        """dx += du a, in place."""
        right_GKI = dx_GNI.new_empty(len(dx_GNI), self.columns, dx_GNI.shape[2])
        kernels.place_parts(self.a_GRI.mT, columns_of(right_GKI.mT, self.ranks), kernels.RIGHT)
        if len(dx_GNI) == 1:
            dx_GNI[0].addmm_(left_GNK[0], right_GKI[0])
        else:
            dx_GNI.baddbmm_(left_GNK, right_GKI)

    def _scaled(self, sums_GNP: torch.Tensor, left_GNK: torch.Tensor) -> torch.Tensor:
        count, rows, _ = sums_GNP.shape
        value_GNR = torch.empty(count, rows, self.ranks, dtype=torch.float32, device=sums_GNP.device)
        kernels.place_parts(
            sums_GNP,
            columns_of(left_GNK, self.ranks),
            kernels.LEFT,
            sums=kernels.parts(kernels.EACH),
            scale_GR=self.scale_GR,
            adapter_ids=self.adapter_ids,
            value_GNR=value_GNR,
        )
        return value_GNR


def of_weight(left_GNR: torch.Tensor, right_GNI: torch.Tensor) -> torch.Tensor:
    """leftᵀ right, fp32 [G, R, I], for `left_GNR` fp32 and a right side of the activation dtype."""
    count, rows, ranks = left_GNR.shape
    sums = kernels.parts(kernels.EACH)
    parts_GNR = right_GNI.new_empty(count, rows, sums * ranks)
    kernels.place_parts(left_GNR, parts_GNR.unflatten(2, (sums, ranks)).transpose(2, 3), kernels.EACH)
    return product(parts_GNR.mT, right_GNI, torch.float32).unflatten(1, (sums, ranks)).sum(dim=1)


def each(source_GRI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """All parts of fp32 numbers, [G, parts · R, I]."""
    count, ranks, inputs = source_GRI.shape
    sums = kernels.parts(kernels.EACH)
    out_GPI = torch.empty(count, sums * ranks, inputs, dtype=dtype, device=source_GRI.device)
    kernels.place_parts(source_GRI.mT, out_GPI.view(count, sums, ranks, inputs).permute(0, 3, 2, 1), kernels.EACH)
    return out_GPI


def columns_of(out_GNK: torch.Tensor, ranks: int, kind: int = kernels.LEFT) -> torch.Tensor:
    """The columns of a product as [G, N, R, parts], part after part; those that are left over become 0."""
    parts = kernels.parts(kind)
    if out_GNK.shape[2] > parts * ranks:
        out_GNK[:, :, parts * ranks :].zero_()
    return out_GNK[:, :, : parts * ranks].unflatten(2, (parts, ranks)).transpose(2, 3)


def padded(columns: int) -> int:
    """As many columns as rows of matrix units want."""
    return -(-columns // ALIGNED) * ALIGNED


def product(a_GNI: torch.Tensor, b_GIO: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a @ b, matrix by matrix, summed in fp32 and rounded once to `dtype`."""
    if not a_GNI.is_cuda:
        return (a_GNI.float() @ b_GIO.float()).to(dtype)
    one = len(a_GNI) == 1
    a, b, multiply = (a_GNI[0], b_GIO[0], torch.mm) if one else (a_GNI, b_GIO, torch.bmm)
    out: torch.Tensor = multiply(a, b) if dtype == a.dtype else multiply(a, b, out_dtype=dtype)
    return out[None] if one else out


def write_product(a_GNI: torch.Tensor, b_GIO: torch.Tensor, out_GNO: torch.Tensor) -> None:
    """The same into `out_GNO`, of the dtype of a and b."""
    torch.bmm(a_GNI, b_GIO, out=out_GNO)
