"""Decode attention over packed pages as a Triton kernel. `attention.attention` is its specification.

One program reads some pages of one key head for all query heads that share it, and writes the greatest score, the sum
of weights and the weighted sum of values; the parts are joined afterwards (flash decoding). Pages are found by a
table of addresses, so that nothing is gathered first. Pages of one form (widths, groups, rotation) are one launch.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from qkvshare_kernels import reference
from qkvshare_kernels.attention import Packed, PackedPages, Part
from qkvshare_kernels.layout import SIDE_NUMBERS, row_bytes, side
from qkvshare_kernels.triton_codec import load_values

_PAGES_PER_PROGRAM = 4
_LONGEST_PAGE = 128


@triton.jit
def attention_kernel(
    query_ptr, table_ptr, greatest_ptr, total_ptr, sum_ptr, pages, splits, middle_k, middle_v, QUERIES: tl.constexpr,
    PADDED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, COLUMNS_K: tl.constexpr, COLUMNS_V: tl.constexpr,
    ROW_K: tl.constexpr, ROW_V: tl.constexpr, BITS_K: tl.constexpr, BITS_V: tl.constexpr, GROUP_K: tl.constexpr,
    GROUP_V: tl.constexpr, SYMMETRIC_K: tl.constexpr, SYMMETRIC_V: tl.constexpr, TOKENS: tl.constexpr,
    PER_PROGRAM: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """query [HQ, DK], already scaled; table [pages, 2 * NUMBERS + 1] (layout.side of keys and values, tokens)."""
    head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    group, token = tl.arange(0, PADDED), tl.arange(0, TOKENS).to(tl.int64)
    column_k, column_v = tl.arange(0, COLUMNS_K), tl.arange(0, COLUMNS_V)
    at = (head * QUERIES + group)[:, None] * DK + column_k[None, :]
    asked = (group < QUERIES)[:, None] & (column_k < DK)[None, :]
    query = tl.load(query_ptr + at, mask=asked, other=0.0)
    greatest = tl.full((PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    summed = tl.zeros((PADDED, COLUMNS_V), tl.float32)
    last = tl.minimum((split + 1) * PER_PROGRAM, pages)
    for page in range(split * PER_PROGRAM, last):
        numbers = table_ptr + page * (2 * NUMBERS + 1)
        tokens = tl.load(numbers + 2 * NUMBERS)
        codes = tl.load(numbers).to(tl.pointer_type(tl.uint8)) + head * tl.load(numbers + 3)
        scale = tl.load(numbers + 1).to(tl.pointer_type(tl.float16)) + head * tl.load(numbers + 4)
        minimum = tl.load(numbers + 2).to(tl.pointer_type(tl.float16)) + head * tl.load(numbers + 4)
        there = (token < tokens)[:, None] & (column_k < DK)[None, :]
        keys = load_values(codes, scale, minimum, token, column_k, there, middle_k, DK, ROW_K, BITS_K, True,
                           SYMMETRIC_K, GROUP_K)  # fmt: skip
        keys = tl.where(there, keys, 0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        scores = tl.where((token < tokens)[None, :], scores, float("-inf"))
        now = tl.maximum(greatest, tl.max(scores, 1))
        fade, weights = tl.exp(greatest - now), tl.exp(scores - now[:, None])
        numbers += NUMBERS
        codes = tl.load(numbers).to(tl.pointer_type(tl.uint8)) + head * tl.load(numbers + 3)
        scale = tl.load(numbers + 1).to(tl.pointer_type(tl.float16)) + head * tl.load(numbers + 4)
        minimum = tl.load(numbers + 2).to(tl.pointer_type(tl.float16)) + head * tl.load(numbers + 4)
        there = (token < tokens)[:, None] & (column_v < DV)[None, :]
        values = load_values(codes, scale, minimum, token, column_v, there, middle_v, DV, ROW_V, BITS_V, False,
                             SYMMETRIC_V, GROUP_V)  # fmt: skip
        values = tl.where(there, values, 0.0)
        total = total * fade + tl.sum(weights, 1)
        summed = summed * fade[:, None] + tl.dot(weights, values, input_precision="ieee")
        greatest = now
    part = (head * splits + split) * QUERIES + group
    tl.store(greatest_ptr + part, greatest, mask=group < QUERIES)
    tl.store(total_ptr + part, total, mask=group < QUERIES)
    filled = (group < QUERIES)[:, None] & (column_v < DV)[None, :]
    tl.store(sum_ptr + part[:, None] * DV + column_v[None, :], summed, mask=filled)


def attend(
    query: Tensor,
    packed: PackedPages,
    scaling: float,
    empty: Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor],
) -> list[Part] | None:
    """What the packed pages add, to be joined with native tokens; None for forms that the kernel doesn't know."""
    tables = _tables(packed, query.device)
    if tables is None:
        return None
    parts: list[Part] = []
    for (keys, values), table in tables:
        heads, dk, dv = keys.codes.shape[0], keys.dim, values.dim
        queries, pages = query.shape[0] // heads, table.shape[0]
        splits = triton.cdiv(pages, _PAGES_PER_PROGRAM)
        scaled = query.float() * scaling
        scaled = (reference.rotate(scaled) if keys.rotated else scaled).contiguous()
        greatest = empty((heads, splits, queries), torch.float32, query.device)
        total = empty((heads, splits, queries), torch.float32, query.device)
        summed = empty((heads, splits, queries, dv), torch.float32, query.device)
        attention_kernel[(heads, splits)](
            scaled, table, greatest, total, summed, pages, splits, ((1 << keys.bits) - 1) / -2,
            ((1 << values.bits) - 1) / -2, QUERIES=queries, PADDED=max(16, triton.next_power_of_2(queries)), DK=dk,
            DV=dv, COLUMNS_K=max(16, triton.next_power_of_2(dk)), COLUMNS_V=max(16, triton.next_power_of_2(dv)),
            ROW_K=row_bytes(dk, keys.bits), ROW_V=row_bytes(dv, values.bits), BITS_K=keys.bits, BITS_V=values.bits,
            GROUP_K=keys.group_size or 1 << 30, GROUP_V=values.group_size or dv, SYMMETRIC_K=keys.minimum is None,
            SYMMETRIC_V=values.minimum is None, TOKENS=_LONGEST_PAGE, PER_PROGRAM=_PAGES_PER_PROGRAM,
            NUMBERS=SIDE_NUMBERS, enable_fp_fusion=True,
        )  # fmt: skip
        if values.rotated:
            summed = reference.rotate(summed)
        parts += [(greatest[:, i], total[:, i], summed[:, i]) for i in range(splits)]
    return parts


def _tables(packed: PackedPages, device: torch.device) -> list[tuple[tuple[Packed, Packed], Tensor]] | None:
    """Of each form of pages one of them, and the addresses of all."""
    known: tuple[int, list[tuple[tuple[Packed, Packed], Tensor]]] | None = packed.prepared.get("triton")
    if known is None or known[0] != len(packed.pages):
        rows: dict[tuple[object, ...], tuple[tuple[Packed, Packed], list[list[int]]]] = {}
        for page in packed.pages:
            sides, tokens = [side(page[0], "channel"), side(page[1], "token")], page[0].codes.shape[-2]
            if None in sides or tokens > _LONGEST_PAGE:
                return None
            form = tuple((x.bits, x.group_size, x.rotated, x.minimum is None) for x in page)
            rows.setdefault(form, (page, []))[1].append([*(n for s in sides for n in s or ()), tokens])
        tables = [(page, torch.tensor(found, dtype=torch.int64, device=device)) for page, found in rows.values()]
        known = packed.prepared["triton"] = len(packed.pages), tables
    return known[1]
