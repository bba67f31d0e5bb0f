"""Faults in the weight formats and their rounding steps."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FORMATS = "spyglass/quant/formats.py"
PACK = "spyglass/quant/pack.py"
CODEC = "spyglass/quant/codec.py"
TESTS = "tests/unit/quant"

QUANT_ROWS: list[Mutant] = [
    Mutant(FORMATS, "-(-shape[-2] // rows)", "shape[-2] // rows", TESTS, "no scale for a last short block of rows"),
    Mutant(FORMATS, "-(-shape[-1] // columns)", "shape[-1] // columns", TESTS, "no scale for a last short block of columns"),
    Mutant(FORMATS, "shape[-1] // 2)", "shape[-1])", TESTS, "fp4 not packed"),
    Mutant(FORMATS, "bits=4, block=(1, 32)", "bits=4, block=(1, 16)", "tests/unit/checkpoint/test_schema.py", "fp4 scales every 16"),
    Mutant(PACK, "3.0, 4.0, 6.0)", "3.0, 4.0, 5.0)", TESTS, "a wrong code table"),
    Mutant(PACK, "(values[byte & 15], values[byte >> 4])", "(values[byte >> 4], values[byte & 15])", TESTS,
           "nibbles swapped when read"),
    Mutant(PACK, "codes[..., 0::2] | (codes[..., 1::2] << 4)", "codes[..., 1::2] | (codes[..., 0::2] << 4)", TESTS,
           "nibbles swapped when written"),
    Mutant(PACK, "torch.signbit(values)", "(values < 0)", TESTS, "the sign of zero lost"),
    Mutant(PACK, "torch.where(scale == 0, torch.full_like(bits, 0x00400000), bits)", "bits", TESTS, "byte 0 is zero"),
    Mutant(PACK, "torch.where(scale == E8M0_NAN, torch.full_like(bits, 0x7FC00000), bits)", "bits", TESTS, "byte 255 is infinite"),
    Mutant(PACK, "exponent.clamp(-127, 127) + 127", "exponent.clamp(-127, 127) + 128", TESTS, "the bias is off by one"),
    Mutant(CODEC, "torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))",
           "torch.where(magnitude <= 2, 0.5, torch.where(magnitude <= 4, 1.0, 4.0))", TESTS, "the last step is 4"),
    Mutant(CODEC, "return torch.round(x / step) * step", "return torch.floor(x / step + 0.5) * step", TESTS,
           "e2m1 halves rounded up"),
    Mutant(CODEC, "(bits >> 23) + ((bits & 0x7FFFFF) != 0)", "(bits >> 23) + ((bits & 0x7FFFFF) >= 0)", TESTS,
           "exact powers of two rounded up"),
    Mutant(CODEC, "exponent - (mantissa == 0.5).to(torch.int32)", "exponent", TESTS, "encoding doubles exact scales"),
    Mutant(CODEC, "repeat_interleave(columns, dim=1)[:, :in_features]", "repeat(1, columns)[:, :in_features]", TESTS,
           "scales interleaved over columns"),
    Mutant(CODEC, "repeat_interleave(rows, dim=0)[: stop - row]", "repeat(rows, 1)[: stop - row]", TESTS,
           "scales interleaved over rows"),
    Mutant(CODEC, "if not torch.isfinite(amax).all():", "if False:", TESTS, "infinite values stored"),
    Mutant(CODEC, "first // max(height, 1) * -(-height // rows)", "0", TESTS, "every expert uses the first one's scales"),
    Mutant(CODEC, "height = len(data) if out_features % rows == 0 else out_features", "height = len(data)", TESTS,
           "scale blocks run on into the next matrix"),
]  # fmt: skip
