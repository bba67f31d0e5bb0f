"""Device functions the products share: stored codes to bf16 in registers, tensor-core fragments, rounding of inputs.

Every thread loads 16 bytes of one weight row, eight 16-bit elements r that hold P weights each (4 of FP4, 2 of FP8, 1
of bf16). Lane t of a group of four takes the t-th 16 bytes of a step of 32 P inputs, and the four lanes' words are
used as a tensor core's A fragment as they lie: the order of a sum is free, so x is read in the same order instead.
Nothing is shuffled and no shared memory is used. `ASM` is False in Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def power_pair(byte, BIAS: tl.constexpr) -> tl.tensor:
    """An e8m0 byte as 2^(byte + BIAS - 127) in bf16, twice in 32 bits; `byte + BIAS` must lie in 1..254."""
    return (byte.to(tl.int32) + BIAS) * 0x00800080


@triton.jit
def scale_pair(s, place, BIAS: tl.constexpr) -> tl.tensor:
    """`power_pair` of byte `place` of scales given as int16: an operand that comes from single bytes would get another
    tensor-core layout than weights that come from 16-bit elements.
    """
    two = tl.load(s + place // 2).to(tl.int32)
    return power_pair((two >> (place % 2 * 8)) & 255, BIAS)


@triton.jit
def decode_fp4(w, s, ASM: tl.constexpr) -> tl.tensor:
    """int16 [.., 8] of four e2m1 codes and `power_pair(u, 94)`: four bf16 [.., 8], value p of element r is input
    4 r + p.

    Values are 2^-32 of the true ones, so that scale bytes 27 to 160 are exact with one multiplication.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, z; mov.b32 z, 0x80008000;
            shl.b32 t, $4, 12; and.b32 t, t, z; shl.b32 u, $4, 6;
            and.b32 u, u, 0x01C001C0; or.b32 t, t, u; fma.rn.bf16x2 $0, t, $5, z;
            shl.b32 t, $4, 8; and.b32 t, t, z; shl.b32 u, $4, 2;
            and.b32 u, u, 0x01C001C0; or.b32 t, t, u; fma.rn.bf16x2 $1, t, $5, z;
            shl.b32 t, $4, 4; and.b32 t, t, z; shr.b32 u, $4, 2;
            and.b32 u, u, 0x01C001C0; or.b32 t, t, u; fma.rn.bf16x2 $2, t, $5, z;
            and.b32 t, $4, z; shr.b32 u, $4, 6; and.b32 u, u, 0x01C001C0;
            or.b32 t, t, u; fma.rn.bf16x2 $3, t, $5, z; }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [w, s],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        f = (s << 16).to(tl.float32, bitcast=True)
        h = w.to(tl.int32)
        return _e2m1(h, f), _e2m1(h >> 4, f), _e2m1(h >> 8, f), _e2m1(h >> 12, f)


@triton.jit
def _e2m1(h, f) -> tl.tensor:
    return (((h & 8) << 28) | ((h & 7) << 22)).to(tl.float32, bitcast=True) * f


@triton.jit
def decode_fp4_tiled(w, s, ASM: tl.constexpr) -> tl.tensor:
    """The same for tiled weights (`experts_grouped.triton.tile`): value p of element r is input 8 p + r.

    The codes of a 32-bit word lie so that nine operations bring all eight to the bits 15, 8..6 of their half.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, z; mov.b32 z, 0x80008000;
            and.b32 t, $4, 0x81C081C0; fma.rn.bf16x2 $0, t, $5, z;
            shl.b32 t, $4, 6; and.b32 t, t, 0x81C081C0; fma.rn.bf16x2 $1, t, $5, z;
            shf.l.wrap.b32 t, $4, $4, 28; and.b32 t, t, 0x81C081C0; fma.rn.bf16x2 $2, t, $5, z;
            shf.l.wrap.b32 t, $4, $4, 10; and.b32 t, t, 0x81808180;
            shl.b32 u, $4, 2; and.b32 u, u, 0x00400040; or.b32 t, t, u; fma.rn.bf16x2 $3, t, $5, z; }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [w, s],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        f = (s << 16).to(tl.float32, bitcast=True)
        L: tl.constexpr = w.shape[0]
        even, odd = tl.split(tl.reshape(w, (L, 4, 2)))
        word = (odd.to(tl.uint32) << 16) | (even.to(tl.uint32) & 0xFFFF)
        v0 = word
        v1 = word << 6
        v2 = (word << 28) | (word >> 4)
        v3 = (((word << 10) | (word >> 22)) & 0x81808180) | ((word << 2) & 0x00400040)
        return _halves(v0, f), _halves(v1, f), _halves(v2, f), _halves(v3, f)


@triton.jit
def _halves(word, f) -> tl.tensor:
    low = ((word & 0x81C0) << 16).to(tl.float32, bitcast=True)
    high = (word & 0x81C00000).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), (word.shape[0], 8)) * f


@triton.jit
def decode_fp8(w, s, ASM: tl.constexpr) -> tl.tensor:
    """int16 [.., 8] of two e4m3 codes and `power_pair(u, 104)`: two bf16 [.., 8], inputs 0 to 7 and 8 to 15.

    Values are 2^-16 of the true ones; scale bytes 19 to 150 are exact.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 t, u, z; mov.b32 z, 0x80008000;
            prmt.b32 t, $8, 0, 0x1404; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0;
            and.b32 t, t, z; or.b32 t, t, u; fma.rn.bf16x2 $0, t, $12, z;
            prmt.b32 t, $8, 0, 0x3424; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0;
            and.b32 t, t, z; or.b32 t, t, u; fma.rn.bf16x2 $1, t, $12, z;
            prmt.b32 t, $9, 0, 0x1404; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0;
            and.b32 t, t, z; or.b32 t, t, u; fma.rn.bf16x2 $2, t, $12, z;
            prmt.b32 t, $9, 0, 0x3424; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0;
            and.b32 t, t, z; or.b32 t, t, u; fma.rn.bf16x2 $3, t, $12, z;
            prmt.b32 t, $10, 0, 0x1404; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0;
            and.b32 t, t, z; or.b32 t, t, u; fma.rn.bf16x2 $4, t, $12, z;
            prmt.b32 t, $10, 0, 0x3424; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0;
            and.b32 t, t, z; or.b32 t, t, u; fma.rn.bf16x2 $5, t, $12, z;
            prmt.b32 t, $11, 0, 0x1404; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0;
            and.b32 t, t, z; or.b32 t, t, u; fma.rn.bf16x2 $6, t, $12, z;
            prmt.b32 t, $11, 0, 0x3424; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0;
            and.b32 t, t, z; or.b32 t, t, u; fma.rn.bf16x2 $7, t, $12, z;
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
            [w, s],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=8,
        )
    else:
        f = (s << 16).to(tl.float32, bitcast=True)
        h = w.to(tl.int32)
        v = tl.reshape(tl.join(_e4m3(h, f), _e4m3(h >> 8, f)), (h.shape[0], 2, 8))
        return tl.split(tl.permute(v, (0, 2, 1)))


@triton.jit
def _e4m3(h, f) -> tl.tensor:
    return (((h & 128) << 24) | ((h & 127) << 20)).to(tl.float32, bitcast=True) * f


@triton.jit
def weight_words(wp, c, STEPS: tl.constexpr, STRIDE: tl.constexpr) -> tl.tensor:
    """The 16-byte words of the steps of chunk c, all asked for before any is used."""
    words: tl.tensor = ()
    for j in tl.static_range(STEPS):
        words = words + (tl.load(wp + (c * STEPS + j) * STRIDE, eviction_policy="evict_first"),)
    return words


@triton.jit
def scale_words(
    s, n, begin, lane, c, K,
    FORMAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, TILED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scales [L] of the steps of chunk c, as `pair_of` takes them: rows n, sums that begin at `begin`.

    FP4: a 32-bit word of four bytes, one a lane or, TILED, one a step (`s` as int32); FP8: the byte (`s` as int16).
    """
    if TILED:
        word = tl.load(s + n // 16 * (K // 8) + (begin // 512 + c) * 64 + n % 16 * 4 + lane)
        return word, word, word, word
    elif FORMAT == 4:
        at = s + (n * (K // 128) + begin // 128 + c * STEPS)[:, None]
        if STEPS == 4:
            even, odd = tl.split(tl.reshape(tl.load(at + tl.arange(0, 4)[None, :]), (n.shape[0], 2, 2)))
            w0, w2 = tl.split(even)
            w1, w3 = tl.split(odd)
            return w0, w1, w2, w3
        elif STEPS == 2:
            return tl.split(tl.load(at + tl.arange(0, 2)[None, :]))
        else:
            return (tl.load(s + n * (K // 128) + begin // 128 + c),)
    else:
        found: tl.tensor = ()
        if FORMAT == 8:
            row = n // BLOCK_N * (K // BLOCK_K)
            for j in tl.static_range(STEPS):
                if BLOCK_K >= 64:
                    place = row + begin // BLOCK_K + c * (STEPS * 64 // BLOCK_K) + j * 64 // BLOCK_K
                else:
                    place = row + (begin + (c * STEPS + j) * 64 + lane * 16) // BLOCK_K
                found = found + ((tl.load(s + place // 2).to(tl.int32) >> (place % 2 * 8)) & 255,)
        else:
            for j in tl.static_range(STEPS):
                found = found + (n,)
        return found


@triton.jit
def weight_fields(words, scale, shift, FORMAT: tl.constexpr, TILED: tl.constexpr, ASM: tl.constexpr) -> tl.tensor:
    """The P tensors [L, 8] of 16-byte words [L, 8] and what `scale_words` gave for them; `shift` of a byte of FP4."""
    if TILED:
        return decode_fp4_tiled(words, power_pair((scale >> shift) & 255, 94)[:, None], ASM)
    elif FORMAT == 4:
        return decode_fp4(words, power_pair((scale >> shift) & 255, 94)[:, None], ASM)
    elif FORMAT == 8:
        return decode_fp8(words, power_pair(scale, 104)[:, None], ASM)
    else:
        return (words.to(tl.bfloat16, bitcast=True),)


@triton.jit
def input_fields(xp, there, FORMAT: tl.constexpr, BM: tl.constexpr, NW: tl.constexpr) -> tl.tensor:
    """The right fragments that belong to `weight_fields`."""
    found: tl.tensor = ()
    for p in tl.static_range(16 // FORMAT):
        found = found + (right_fragment(tl.load(xp + p * 8, mask=there, other=0.0), BM, NW),)
    return found


@triton.jit
def add_fields(acc, fields, inputs, P: tl.constexpr, BN: tl.constexpr, NW: tl.constexpr) -> tl.tensor:
    """acc + fields · inputs."""
    for p in tl.static_range(P):
        acc = tl.dot(left_fragment(fields[p], BN, NW).to(inputs[p].dtype), inputs[p], acc)
    return acc


@triton.jit
def left_fragment(v, BN: tl.constexpr, NW: tl.constexpr) -> tl.tensor:
    """Rows [BN / 8, NW warps, 8 rows, 4 lanes] times 8 to [NW, BN, 32]: the warps are apart along the sum."""
    v = tl.permute(tl.reshape(v, (BN // 16, 2, NW, 8, 4, 2, 2, 2)), (2, 0, 1, 3, 5, 6, 4, 7))
    return tl.reshape(v, (BN, 32) if NW == 1 else (NW, BN, 32))


@triton.jit
def right_fragment(v, BM: tl.constexpr, NW: tl.constexpr) -> tl.tensor:
    """Tokens [BM / 8, NW, 8 tokens, 4 lanes] times 8 to [NW, 32, BM]."""
    v = tl.permute(tl.reshape(v, (BM // 8, NW, 8, 4, 2, 2, 2)), (1, 4, 5, 3, 6, 0, 2))
    return tl.reshape(v, (32, BM) if NW == 1 else (NW, 32, BM))


@triton.jit
def round_e4m3(x, amax) -> tl.tensor:
    """`fake_quant` of fp32 values whose blocks have the largest magnitudes `amax` (shapes that broadcast)."""
    product = (tl.maximum(amax, 1e-4) * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = (product >> 23) + ((product & 0x7FFFFF) != 0).to(tl.int32)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    code = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    code = tl.minimum(tl.maximum(code, -448.0), 448.0)
    bits = code.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
    small = (code + 24576.0) - 24576.0  # steps of 2^-9
    return tl.where(tl.abs(code) < 0.015625, small, normal) * scale


@triton.jit
def settled(acc, ASM: tl.constexpr) -> tl.tensor:
    """acc, once the products that wgmma still adds to it are done.

    Triton lets products of one step of a loop run while the next step decodes weights into the registers they read.
    """
    if ASM:
        return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return acc
