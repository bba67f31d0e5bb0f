"""The assembly that decodes weights, which no interpreter runs, gives every code its number."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from spyglass.quant.formats import FP4
from spyglass.quant.pack import unpack_e2m1
from spyglass.quant.packed import Packed
from spyglass.quant.tiles import tile

SOURCE = Path(__file__).resolve().parents[2] / "spyglass" / "ops" / "linear_block" / "triton_decode.py"
WORD = 0xFFFFFFFF


def assembly(function: str) -> list[list[str]]:
    """Instructions of a function as lists of a name and operands."""
    source = SOURCE.read_text(encoding="utf-8")
    found = re.search(r'"""\{(.*?)\}"""', source[source.index(f"def {function}(") :], re.DOTALL)
    assert found
    lines = (line.strip() for line in found[1].replace("\n", " ").split(";"))
    return [re.split(r"[ ,]+", line) for line in lines if line and not line.startswith(".reg")]


def run(instructions: list[list[str]], inputs: dict[str, int]) -> dict[str, int]:
    """Output registers before they are multiplied with the scale."""
    registers, outputs = dict(inputs), {}
    for name, target, *operands in instructions:
        if name == "fma.rn.bf16x2":
            outputs[target] = registers[operands[0]]
            continue
        a, *more = (registers[x] if x in registers else int(x, 0) for x in operands)
        registers[target] = {
            "mov.b32": lambda a, m: a,
            "and.b32": lambda a, m: a & m[0],
            "or.b32": lambda a, m: a | m[0],
            "shl.b32": lambda a, m: a << m[0] & WORD,
            "shr.b32": lambda a, m: a >> m[0],
            "shf.l.wrap.b32": lambda a, m: (m[0] << m[1] | a >> (32 - m[1])) & WORD,
            "prmt.b32": lambda a, m: _bytes(a, *m),
        }[name](a, more)
    return outputs


def _bytes(a: int, b: int, selector: int) -> int:
    both = b << 32 | a
    return sum((both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i for i in range(4))


def numbers(word: int, exponent: int) -> tuple[float, float]:
    """Both bf16 halves, times 2^exponent."""
    halves = np.array([(word & 0xFFFF) << 16, word & 0xFFFF0000], np.uint32).view(np.float32)
    return tuple(np.ldexp(halves.astype(np.float64), exponent))


@pytest.mark.parametrize("tiled", [False, True])
def test_every_fp4_code_decodes_to_its_number(tiled: bool) -> None:
    data = torch.arange(16 * 256, dtype=torch.int64).mul(89).remainder(256).to(torch.uint8).view(16, 256)
    weight = Packed(FP4, data, torch.full((16, 16), 127, dtype=torch.uint8), (16, 512))
    expected = unpack_e2m1(data, torch.float32).double().view(16, 4, 4, 32)  # row, step, lane, input
    held = tile(weight).data.view(4, 16, 64).transpose(0, 1) if tiled else data.view(16, 4, 64)
    words = held.contiguous().view(16, 4, 4, 16).numpy().view(np.uint32)  # row, step, lane, word
    instructions = assembly("decode_fp4_tiled" if tiled else "decode_fp4")
    for row, step, lane, q in np.ndindex(words.shape):
        outputs = run(instructions, {"$4": int(words[row, step, lane, q])})
        for p in range(4):
            inputs = (8 * p + 2 * q, 8 * p + 2 * q + 1) if tiled else (8 * q + p, 8 * q + 4 + p)
            found = numbers(outputs[f"${p}"], 126)
            assert found == tuple(expected[row, step, lane, list(inputs)].tolist())


def test_every_fp8_code_decodes_to_its_number() -> None:
    codes = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    codes[(codes & 127) == 127] = 0  # no numbers
    expected = codes.view(torch.float8_e4m3fn).double().view(16, 16)
    words = codes.view(16, 16).numpy().view(np.uint32)
    for group in range(16):
        outputs = run(assembly("decode_fp8"), {f"${8 + q}": int(words[group, q]) for q in range(4)})
        found = [value for register in range(8) for value in numbers(outputs[f"${register}"], 120)]
        assert found == expected[group].tolist()
