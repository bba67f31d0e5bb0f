"""Normalised pixels: the reference's values bit for bit, on any dtype, and the prompt room's table is the same one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from spyglass.prompt.image import normalisation_table
from spyglass.vision.pixels import normalised, pixel_table


def test_the_table_holds_the_reference_values_bit_for_bit() -> None:
    samples = np.arange(256, dtype=np.uint8)
    value = (samples.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    bits = value.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(
        np.float32
    )
    assert np.array_equal(pixel_table().numpy(), rounded)
    assert pixel_table()[127].item() == pytest.approx(-0.003936768, abs=1e-9)  # spec v4 9.2: the pad colour
    assert pixel_table()[0].item() == -1 and pixel_table()[255].item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_become_the_bf16_values_whatever_dtype_the_model_runs_in(dtype: torch.dtype) -> None:
    patches = torch.arange(256, dtype=torch.uint8).repeat(3)[:588].view(1, 3, 14, 14)
    expected = pixel_table()[patches.long()]
    assert normalised(patches, dtype).dtype == dtype
    assert torch.equal(normalised(patches, dtype).float(), expected)


def test_floats_are_taken_as_they_are() -> None:
    patches = torch.rand(2, 3, 14, 14)
    assert torch.equal(normalised(patches, torch.float32), patches)
    assert torch.equal(normalised(patches, torch.bfloat16), patches.bfloat16())


def test_the_table_is_that_of_the_prompt_room() -> None:
    assert np.array_equal(pixel_table().numpy(), normalisation_table())
