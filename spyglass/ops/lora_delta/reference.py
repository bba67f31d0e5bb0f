"""What adapters add to a linear map: a low-rank product per row, each row by its own adapter."""

from __future__ import annotations

import torch


def lora_delta(
    x_TGI: torch.Tensor,
    adapter_T: torch.Tensor,
    a_RI: torch.Tensor,
    b_RGO: torch.Tensor,
    adapter_R: torch.Tensor,
    scale_R: torch.Tensor,
) -> torch.Tensor:
    """out_TGO (fp32) = sum_R [adapter_R = adapter_T] · scale_R · (sum_I x_TGI · a_RI) · b_RGO, of un-rounded input.

    The rank rows of all adapters lie in one bank, so ranks may differ: row R belongs to adapter `adapter_R`
    (int32, never 0), of which `scale_R` (fp32) is the factor. G = 1 for dense maps; a block-diagonal map shares `a_RI`
    among its groups. A row of adapter 0, or of one that owns nothing here, gets exactly 0.
    """
    u_TGR = (x_TGI.float() @ a_RI.float().mT) * scale_R
    own_TR = adapter_T[:, None] == adapter_R
    u_TGR = torch.where(own_TR[:, None], u_TGR, 0.0)
    return torch.einsum("tgr,rgo->tgo", u_TGR, b_RGO.float())
