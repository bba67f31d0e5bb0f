"""Rows of the head for tokens that no answer of training holds.

Such a row is pushed away from every answer, the likeliest one most, so in the end all of them are one (cosine 0.999).
An adapter that needs two of these tokens, for a Roman numeral or a French word, could then hardly tell them apart.
"""

from __future__ import annotations

import torch

# From the rows' mean. At 0.4, about where `models.initial_value` puts them, the likeliest leads the next by two nats
# only, and the hundreds of others take most of its probability from it; taught rows are 3.4 and more away.
APART = 1.5


def set_apart(head_VD: torch.Tensor, taught_V: torch.Tensor) -> torch.Tensor:
    """The fp32 head with the rows where `taught_V` is False moved from their mean to the distance `APART`.

    Each goes on in its own direction, the mean stays about where it is, and with it how unlikely they are.
    """
    rows_UD = head_VD[~taught_V]
    mean_D = rows_UD.mean(dim=0)
    away_UD = rows_UD - mean_D
    moved_VD = head_VD.clone()
    moved_VD[~taught_V] = mean_D + APART * away_UD / away_UD.norm(dim=1, keepdim=True).clamp(min=1e-6)
    return moved_VD
