"""quantize and dequantize as Triton kernels. `reference` is their specification, bit for bit.

One program has a tile of tokens of one head. Groups lie along the last axis of a block [A, B, C], so that keys (per
channel) are turned first and values (per token) are not. Launch with `enable_fp_fusion=False`: a fused
multiply-add rounds once where the reference rounds twice. Offsets are int64.
"""

import triton
import triton.language as tl

_STEP = tl.constexpr(2.0**-10)  # 2 * reference.FP16_STEP
_SMALLEST = tl.constexpr(2.0**-14)


@triton.jit
def _rotate(x, LEVELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, norm):
    """Butterflies of distance 1, 2, 4, ... within blocks of 2**LEVELS columns."""
    for level in tl.static_range(LEVELS):
        parts = tl.reshape(x, (ROWS, COLUMNS // (2 << level), 2, 1 << level))
        lower, upper = tl.split(tl.permute(parts, (0, 1, 3, 2)))
        parts = tl.permute(tl.join(lower + upper, lower - upper), (0, 1, 3, 2))
        x = tl.reshape(parts, (ROWS, COLUMNS))
    return x * norm


@triton.jit
def _fold(x, A: tl.constexpr, B: tl.constexpr, LEVELS: tl.constexpr):
    """Sums over the last axis of [A, B, 2**LEVELS], second half onto first half (reference.fold)."""
    for level in tl.static_range(LEVELS):
        halves = tl.permute(tl.reshape(x, (A, B, 2, 1 << (LEVELS - 1 - level))), (0, 1, 3, 2))
        lower, upper = tl.split(halves)
        x = lower + upper
    return tl.reshape(x, (A, B))


@triton.jit
def _ends(x, valid, low, high, largest, share, count_share, fit, SYMMETRIC: tl.constexpr, A: tl.constexpr,
          B: tl.constexpr, LEVELS: tl.constexpr):  # fmt: skip
    """Ends of the code range, moved towards the least squares fit (reference._fitted). low, high: [A, B]."""
    step = tl.maximum(high - low, _SMALLEST) * share
    inverse = tl.div_rn(tl.full((A, B), 1.0, tl.float32), step)
    codes = tl.floor(x * inverse[:, :, None] + (0.5 - low * inverse)[:, :, None])
    if SYMMETRIC:
        middle = tl.full((A, B), 0.5, tl.float32) * largest
        centre = tl.zeros((A, B), tl.float32)
    else:
        middle = _fold(tl.where(valid, codes, 0.0), A, B, LEVELS) * count_share
        centre = _fold(tl.where(valid, x, 0.0), A, B, LEVELS) * count_share
    codes -= middle[:, :, None]
    spread = _fold(tl.where(valid, codes * codes, 0.0), A, B, LEVELS)
    cross = _fold(tl.where(valid, codes * (x - centre[:, :, None]), 0.0), A, B, LEVELS)
    slope = tl.where(spread > 0, tl.div_rn(cross, tl.where(spread > 0, spread, 1.0)), step)
    least = centre - middle * slope
    up = tl.maximum(least - low, 0.0)
    down = tl.maximum(high - (least + largest * slope), 0.0)
    return low + fit * up, high - fit * down


@triton.jit
def quantize_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, heads, tokens, layer_stride, head_stride, token_stride, norm, largest,
    share, twice, count_share, fit, D: tl.constexpr, ROW: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr,
    SYMMETRIC: tl.constexpr, GROUP: tl.constexpr, FIT: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, SLOT: tl.constexpr, BYTES: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one head per program; powers of two: ROWS >= TOKENS, COLUMNS >= D, SLOT >= GROUP, BYTES >= ROW.

    GROUPS: of a token's head, rounded up to a power of two (1 for CHANNEL). BLOCK, LEVELS: powers of two of
    rotated columns (0 for none) and of values in a group's place (ROWS for CHANNEL, else SLOT).
    """
    unit, tile = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    start = tile * TOKENS
    count = tl.minimum(tokens - start, TOKENS)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    source = tl.minimum(row, count - 1)  # ragged groups repeat their last value
    at = unit // heads * layer_stride + unit % heads * head_stride + (start + source) * token_stride
    x = tl.load(x_ptr + at[:, None] + column[None, :], mask=(column < D)[None, :], other=0.0).to(tl.float32)
    finite = tl.sum(tl.sum(tl.where(x * 0.0 == 0.0, 0, 1), 1), 0) == 0
    if BLOCK > 0:
        x = _rotate(x, BLOCK, ROWS, COLUMNS, norm)
    A: tl.constexpr = COLUMNS if CHANNEL else ROWS
    C: tl.constexpr = ROWS if CHANNEL else SLOT
    WIDTH: tl.constexpr = COLUMNS if CHANNEL else GROUPS * SLOT
    if CHANNEL:
        x = tl.reshape(tl.trans(x), (COLUMNS, 1, ROWS))
        place = row
    else:
        slot = tl.arange(0, GROUPS * SLOT)
        place = tl.arange(0, SLOT)
        taken = tl.minimum(slot // SLOT * GROUP + tl.minimum(slot % SLOT, GROUP - 1), D - 1)
        x = tl.gather(x, tl.broadcast_to(taken[None, :], (ROWS, GROUPS * SLOT)), 1)
        x = tl.reshape(x, (ROWS, GROUPS, SLOT))
    valid = tl.broadcast_to((place < GROUP)[None, None, :], (A, GROUPS, C))
    if SYMMETRIC:
        high = tl.max(tl.where(valid, tl.abs(x), 0.0), 2)
        low = -high
    else:
        low = tl.min(tl.where(valid, x, float("inf")), 2)
        high = tl.max(tl.where(valid, x, float("-inf")), 2)
    if FIT:
        low, high = _ends(x, valid, low, high, largest, share, count_share, fit, SYMMETRIC, A, GROUPS, LEVELS)
    if SYMMETRIC:
        width = high * twice
        shown = tl.zeros((A, GROUPS), tl.float32)
    else:
        shown = (low - tl.abs(low) * _STEP + 0.0).to(tl.float16).to(tl.float32)
        width = (high - shown) * share
    scale = tl.maximum(width * (1.0 + _STEP), _SMALLEST).to(tl.float16)
    inverse = tl.div_rn(tl.full((A, GROUPS), 1.0, tl.float32), scale.to(tl.float32))
    if SYMMETRIC:
        offset = tl.full((A, GROUPS), 0.5, tl.float32) * largest + 0.5
    else:
        offset = 0.5 - shown * inverse
    codes = x * inverse[:, :, None] + offset[:, :, None]
    if FIT:
        codes = tl.minimum(tl.maximum(codes, 0.0), largest)
    codes = codes.to(tl.int32)
    stored = tl.where(finite, scale.to(tl.float32), float("nan")).to(tl.float16)
    group = tl.arange(0, GROUPS)
    if CHANNEL:
        at = (unit * ((tokens + TOKENS - 1) // TOKENS) + tile) * D + column[:, None] + group[None, :]
        there = tl.broadcast_to((column < D)[:, None], (A, GROUPS))
    else:
        number: tl.constexpr = (D + GROUP - 1) // GROUP
        at = (unit * tokens + start + row[:, None]) * number + group[None, :]
        there = (row < count)[:, None] & (group < number)[None, :]
    tl.store(scale_ptr + at, stored, mask=there)
    if not SYMMETRIC:
        tl.store(minimum_ptr + at, shown.to(tl.float16), mask=there)
    # codes [ROWS, places] by token; where the code of a column is
    if CHANNEL:
        codes = tl.trans(tl.reshape(codes, (COLUMNS, ROWS)))
    else:
        codes = tl.reshape(codes, (ROWS, WIDTH))
    byte = tl.arange(0, BYTES)
    packed = tl.zeros((ROWS, BYTES), tl.int32)
    if BITS == 3:
        run: tl.constexpr = (D + 7) // 8
        for part in tl.static_range(4):
            low_bits = _codes_at(codes, byte + 2 * run * part, D, GROUP, SLOT, CHANNEL, ROWS, BYTES, WIDTH)
            packed |= tl.where((byte < 2 * run)[None, :], (low_bits & 3) << (2 * part), 0)
        for part in tl.static_range(8):
            high_bits = _codes_at(codes, byte - 2 * run + run * part, D, GROUP, SLOT, CHANNEL, ROWS, BYTES, WIDTH)
            packed |= tl.where((byte >= 2 * run)[None, :], (high_bits >> 2) << part, 0)
    else:
        for part in tl.static_range(8 // BITS):
            bits = _codes_at(codes, byte + ROW * part, D, GROUP, SLOT, CHANNEL, ROWS, BYTES, WIDTH)
            packed |= bits << (BITS * part)
    at = (unit * tokens + start + row[:, None]) * ROW + byte[None, :]
    tl.store(codes_ptr + at, packed.to(tl.uint8), mask=(row < count)[:, None] & (byte < ROW)[None, :])


@triton.jit
def _codes_at(codes, column, D: tl.constexpr, GROUP: tl.constexpr, SLOT: tl.constexpr, CHANNEL: tl.constexpr,
              ROWS: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Codes [ROWS, BYTES] of the given columns; 0 outside of the head."""
    inside = (column >= 0) & (column < D)
    column = tl.where(inside, column, 0)
    place = column
    if not CHANNEL:
        place = column // GROUP * SLOT + column % GROUP
    taken = tl.gather(codes, tl.broadcast_to(place[None, :], (ROWS, BYTES)), 1)
    return tl.where(inside[None, :], taken, 0)


@triton.jit
def load_codes(ptr, at, column, there, D: tl.constexpr, ROW: tl.constexpr, BITS: tl.constexpr):
    """Codes [rows, columns] as float32. at: where each row begins, [rows]; there: mask [rows, columns]."""
    if BITS == 3:
        run: tl.constexpr = (D + 7) // 8
        byte = tl.load(ptr + at[:, None] + (column % (2 * run))[None, :], mask=there, other=0).to(tl.int32)
        high = tl.load(ptr + at[:, None] + (2 * run + column % run)[None, :], mask=there, other=0).to(tl.int32)
        codes = ((byte >> (column // (2 * run) * 2)[None, :]) & 3) | (((high >> (column // run)[None, :]) & 1) << 2)
    else:
        byte = tl.load(ptr + at[:, None] + (column % ROW)[None, :], mask=there, other=0).to(tl.int32)
        codes = (byte >> (column // ROW * BITS)[None, :]) & ((1 << BITS) - 1)
    return codes.to(tl.float32)


@triton.jit
def load_values(
    codes_ptr, scale_ptr, minimum_ptr, token, column, there, middle, D: tl.constexpr, ROW: tl.constexpr,
    BITS: tl.constexpr, CHANNEL: tl.constexpr, SYMMETRIC: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """code * scale + minimum [rows, columns] of one head; pointers are to its first token."""
    codes = load_codes(codes_ptr, token * ROW, column, there, D, ROW, BITS)
    if CHANNEL:
        at = (token // GROUP)[:, None] * D + column[None, :]
    else:
        at = token[:, None] * ((D + GROUP - 1) // GROUP) + (column // GROUP)[None, :]
    scale = tl.load(scale_ptr + at, mask=there, other=0.0).to(tl.float32)
    if SYMMETRIC:
        least = scale * middle
    else:
        least = tl.load(minimum_ptr + at, mask=there, other=0.0).to(tl.float32)
    return codes * scale + least


@triton.jit
def dequantize_kernel(
    codes_ptr, scale_ptr, minimum_ptr, out_ptr, heads, tokens, layer_stride, head_stride, token_stride, codes_stride,
    scale_stride, norm, middle, D: tl.constexpr, ROW: tl.constexpr, BITS: tl.constexpr, CHANNEL: tl.constexpr,
    SYMMETRIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one head per program. Strides in elements."""
    unit = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = (token < tokens)[:, None] & (column < D)[None, :]
    x = load_values(
        codes_ptr + unit * codes_stride, scale_ptr + unit * scale_stride, minimum_ptr + unit * scale_stride, token,
        column, there, middle, D, ROW, BITS, CHANNEL, SYMMETRIC, GROUP,
    )  # fmt: skip
    if BLOCK > 0:
        x = _rotate(x, BLOCK, ROWS, COLUMNS, norm)
    at = unit // heads * layer_stride + unit % heads * head_stride + token * token_stride
    tl.store(out_ptr + at[:, None] + column[None, :], x.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def turn_kernel(x, cos, sin, heads, tokens, layer_stride, head_stride, token_stride, FIRST: tl.constexpr,
                PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Pairs of values of a tile of tokens of one head, turned in place (plain.turn)."""
    unit = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    pairs = tl.arange(0, COLUMNS)[None, :]
    valid = (rows < tokens) & (pairs < PAIRS)
    head = x + unit // heads * layer_stride + unit % heads * head_stride + FIRST
    left = head + rows.to(tl.int64) * token_stride + (2 * pairs if INTERLEAVED else pairs)
    right = left + (1 if INTERLEAVED else PAIRS)
    a, b = tl.load(left, valid, 0).to(tl.float32), tl.load(right, valid, 0).to(tl.float32)
    angles = rows * PAIRS + pairs
    c, s = tl.load(cos + angles, valid, 0), tl.load(sin + angles, valid, 0)
    tl.store(left, (a * c - b * s).to(x.dtype.element_ty), valid)
    tl.store(right, (b * c + a * s).to(x.dtype.element_ty), valid)
