"""Weights lie in pages of 2 MiB where the system has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spyglass.quant.formats import FP4
from spyglass.quant.packed import empty_packed, in_large_pages

MAPS = Path("/proc/self/smaps")


def asked_for(address: int) -> bool:
    """Whether the memory at an address is to come in large pages, as the kernel has it."""
    within = False
    for line in MAPS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            start, _, stop = first.partition("-")
            within = int(start, 16) <= address < int(stop, 16)
        elif within and first == "VmFlags:":
            return "hg" in line.split()
    return False


@pytest.mark.skipif(
    not MAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no such pages here"
)
def test_memory_of_a_large_weight_is_asked_for_in_large_pages() -> None:
    weight = empty_packed(FP4, (8, 1024, 4096))
    assert weight.data.shape == (8, 1024, 2048) and asked_for(weight.data.data_ptr() + (8 << 20))


def test_small_and_absent_memory_is_left_alone() -> None:
    for tensor in (torch.arange(5), torch.empty(0), torch.empty(1 << 30, device="meta")):
        assert in_large_pages(tensor) is tensor
    assert in_large_pages(torch.arange(5)).tolist() == [0, 1, 2, 3, 4]
