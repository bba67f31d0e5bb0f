"""Cross-entropy as a sum and a count, so that steps of different sizes add up to one mean (token-weighted)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spyglass.model import VisionLanguageModel
from spyglass.parallel.fsdp import Touch
from spyglass.train.packing import PackedStep

IGNORED = -100  # a target that counts for nothing


def token_loss(logits_RV: torch.Tensor, targets_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ_r log Σ_v exp(logits_rv) - logits_r,target in fp32, and the number of targets (both on the device).

    Rows with target `IGNORED` add nothing to either. Divide by the count of all steps of an update, never per step.
    """
    loss = torch.nn.functional.cross_entropy(logits_RV.float(), targets_R, ignore_index=IGNORED, reduction="sum")
    return loss, (targets_R != IGNORED).sum()


def step_logits(model: VisionLanguageModel, step: PackedStep, of_images: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Logits fp32 [R, V] of a packed step: the four parts of the serving model.

    `of_images`: leaves that only images reach. A step without one gives them zeros, so that it can be
    differentiated where nothing else is trained, and processes that wait for one another all run backwards.
    """
    image_rows = None if step.images is None else model.encode_images(step.images)
    streams_TMC = model.embed(step.batch, image_rows)
    if image_rows is None and of_images:
        streams_TMC = Touch.apply(streams_TMC, *of_images)  # type: ignore[no-untyped-call]
    hidden_TC, _ = model.text(streams_TMC, step.batch, step.cache)
    return model.logits(hidden_TC, step.batch.logit_rows_R)
