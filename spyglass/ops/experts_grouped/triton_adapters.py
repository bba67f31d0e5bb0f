"""Adapters of routed experts on a GPU: shrunk in a launch of their own, expanded inside the product they join."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def choice_of(ids, listed, first, size, slot, expert, rows, KC: tl.constexpr, SORT: tl.constexpr) -> tl.tensor:
    """The choice in each slot, -1 where there is none. Without SORT slot t is row t."""
    if SORT:
        return tl.load(listed + first + slot, mask=slot < size, other=-1)
    else:
        found = slot * 0 - 1
        for k in tl.static_range(KC):
            e = tl.load(ids + slot * KC + k, mask=slot < rows, other=-1)
            found = tl.where(e == expert, slot * KC + k, found)
        return found


@triton.jit
def bank_of(adapter_T, adapter_A, choice, num_adapters, KC: tl.constexpr, SP: tl.constexpr) -> tl.tensor:
    """Which of the adapters the row of each choice takes, -1 for none."""
    s = tl.arange(0, SP)
    own = tl.load(adapter_T + choice // KC, mask=choice >= 0, other=0)
    held = tl.load(adapter_A + s, mask=s < num_adapters, other=-1)
    return tl.max(tl.where(own[:, None] == held[None, :], s[None, :], -1), 1)


@triton.jit(do_not_specialize=["choices", "rows", "num_adapters", "room"])
def shrink(
    x, ids, listed, block_expert, block_first, block_size, adapter_T, adapter_A, a0, scale0, start0, a1, scale1, start1,
    u, choices, rows, num_adapters, room,
    K: tl.constexpr, E: tl.constexpr, KC: tl.constexpr, BY_ROW: tl.constexpr, SORT: tl.constexpr, BT: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, NS: tl.constexpr, SP: tl.constexpr, CP: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """u[m, c, r] (fp32) = scale_r a_r x: rank rows, of each choice's own adapter and expert, of matrix m.

    `room` rank rows lie in u for each choice; those that an adapter lacks are not written. x is read by row or, without
    BY_ROW, by choice.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(1)
    second = tl.program_id(2) == 1
    slot = tl.arange(0, BT)
    if SORT:
        expert = tl.load(block_expert + b)
        if expert < 0:
            return
        choice = choice_of(ids, listed, tl.load(block_first + b), tl.load(block_size + b), slot, expert, rows, KC, SORT)
    else:
        expert = tl.load(ids + b)
        c = tl.arange(0, CP)
        earlier = tl.load(ids + c, mask=c < b, other=-1) == expert
        if (expert < 0) | (tl.max(earlier.to(tl.int32), 0) > 0):
            return
        choice = choice_of(ids, listed, 0, 0, slot, expert, rows, KC, SORT)
    a = tl.where(second, a1, a0)
    scale = tl.where(second, scale1, scale0)
    start = tl.where(second, start1, start0)
    k = tl.arange(0, BK)
    row = tl.maximum(choice, 0) // KC if BY_ROW else tl.maximum(choice, 0)
    xp = x + row.to(tl.int64)[:, None] * K + k[None, :]
    at = tl.program_id(0) * BR + tl.arange(0, BR)
    to = u + ((tl.program_id(2) * choices + tl.maximum(choice, 0)).to(tl.int64) * room)[:, None] + at[None, :]
    left = bank_of(adapter_T, adapter_A, choice, num_adapters, KC, SP)
    bank = tl.max(left, 0)
    while bank >= 0:
        own = left == bank
        r = tl.load(start + bank * (E + 1) + expert) + at
        there = r < tl.load(start + bank * (E + 1) + expert + 1)
        if tl.max(there.to(tl.int32), 0) > 0:
            ap = a + r.to(tl.int64)[None, :] * K + k[:, None]
            acc = tl.zeros((BT, BR), tl.float32)
            for first in tl.range(0, K, BK, num_stages=NS):
                xt = tl.load(xp + first, mask=own[:, None] & (first + k < K)[None, :], other=0.0)
                rt = tl.load(ap + first, mask=there[None, :] & (first + k < K)[:, None], other=0.0)
                if xt.dtype != rt.dtype:
                    xt = xt.to(tl.float32)
                    rt = rt.to(tl.float32)
                acc = tl.dot(xt, rt, acc, input_precision="ieee")
            acc = acc * tl.load(scale + r, mask=there, other=0.0)[None, :]
            tl.store(to, acc, mask=own[:, None] & there[None, :])
        left = tl.where(own, -1, left)
        bank = tl.max(left, 0)


@triton.jit
def expand(
    acc, n, choice, bank, expert, u, b, start, room, N: tl.constexpr, E: tl.constexpr, BR: tl.constexpr
) -> tl.tensor:
    """acc [outputs n, choices] + b u, rank rows of each choice's own adapter."""
    r = tl.arange(0, BR)
    up = u + (tl.maximum(choice, 0).to(tl.int64) * room)[None, :] + r[:, None]
    left = bank
    s = tl.max(left, 0)
    while s >= 0:
        own = left == s
        begin = tl.load(start + s * (E + 1) + expert)
        count = tl.load(start + s * (E + 1) + expert + 1) - begin
        for first in tl.range(0, count, BR, num_stages=1):
            there = first + r < count
            bt = tl.load(b + (begin + first + r).to(tl.int64)[None, :] * N + n[:, None], mask=there[None, :], other=0.0)
            ut = tl.load(up + first, mask=own[None, :] & there[:, None], other=0.0)
            added = tl.dot(bt.to(tl.float32), ut, input_precision="ieee")
            acc = tl.where(own[None, :], acc + added, acc)
        left = tl.where(own, -1, left)
        s = tl.max(left, 0)
    return acc
