"""Uniform quantization of groups in plain torch: the specification of all kernels, and their fallback.

Axis letters: `L` layers, `H` KV heads, `T` tokens, `D` head size, `G` groups. A *group* is the set of values that
share one scale. It runs along the tokens of one channel (`dim` -2) or along the head dimension of one token
(`dim` -1). The value of a code is `x ~ code * scale + minimum`; the minimum is called zero point in the papers (KIVI,
arXiv 2402.02750), where it is an integer. Without a stored minimum (`symmetric`) the codes lie evenly on both sides
of zero: the minimum is `-(2**bits - 1) / 2 * scale`, and no code stands for zero itself.

Scales and minima are stored in fp16. Both are rounded outwards (the minimum down, the scale up), so that
every value of the group lies inside the code range and no clamping pass is needed; with `fit` they are moved from
the range of the group towards the least squares fit to the codes, and outlying values are clamped. Codes are
`floor(v + 0.5)`, which all implementations share, since `round` is half-to-even here and elsewhere not.

Other implementations give the same codes, scales and minima bit for bit. That takes a stated order: every product
and every sum is rounded (no fused multiply-add), sums over a group are folded in halves (`fold`), and rotations are
butterflies (`rotate`), not the matrix product that would give the same but for its last bits.
"""

from functools import lru_cache

import torch
from torch import Tensor

FP16_STEP = 2.0**-11  # half the relative distance of neighbouring fp16 numbers
SMALLEST_SCALE = 2.0**-14  # smallest normal fp16 number; a constant group gets this scale


def quantize(
    x: Tensor, bits: int, dim: int, *, symmetric: bool, group_size: int | None = None, fit: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Encode `x` [..., T, D] (float32) in groups of `group_size` along `dim` (-2 or -1); None: the whole of it.

    fit: 0 takes scale and minimum from the smallest and the largest value, 1 from a least squares fit to the codes
    that these give, and values between go part of the way.

    Returns (codes, scale, minimum): codes like `x` in uint8, scale and minimum in fp16 with G instead of the
    grouped size; the minimum is None if symmetric. The last group may be smaller. NaN, Inf and magnitudes
    beyond fp16 show as a scale or minimum that is not finite; the caller checks.
    """
    size = x.shape[dim]
    group = min(group_size or size, size)
    if padding := -size % group:  # repeat the last value: it is in the last group's range already
        x = torch.cat([x, x.narrow(dim, size - 1, 1).expand(*_sizes(x, dim, padding))], dim)
    x, inner = x.unflatten(dim, (-1, group)), dim  # the groups' own axis comes before the grouped one
    largest = (1 << bits) - 1
    if symmetric:
        high = x.abs().amax(inner, keepdim=True)
        low = -high
    else:
        low, high = x.amin(inner, keepdim=True), x.amax(inner, keepdim=True)
    if fit:
        low, high = _fitted(x, low, high, largest, inner, symmetric, fit)
    if symmetric:
        minimum, scale = None, _round_up(high * (2 / largest))
        inverse = scale.float().reciprocal()
        offset = x.new_tensor(largest / 2 + 0.5)
    else:
        least = (low - low.abs() * (2 * FP16_STEP) + 0.0).to(torch.float16)  # + 0.0: no minimum is -0.0 for 0.0
        minimum, scale = least.squeeze(inner), _round_up((high - least.float()) * (1 / largest))
        inverse = scale.float().reciprocal()
        offset = 0.5 - least.float() * inverse
    # floor(v + 0.5) by truncation: nothing is negative behind the clamp, and without a fit nothing is before it
    codes = torch.mul(x, inverse).add_(offset)
    codes = (codes.clamp_(0, largest) if fit else codes).to(torch.uint8)
    return codes.flatten(dim - 1, dim).narrow(dim, 0, size), scale.squeeze(inner), minimum


def _fitted(
    x: Tensor, low: Tensor, high: Tensor, largest: int, inner: int, symmetric: bool, fit: float
) -> tuple[Tensor, Tensor]:
    """Ends of the code range, moved by `fit` of the way to the least squares line through (code, value)."""
    share = 1 / x.shape[inner]
    step = (high - low).clamp_min(SMALLEST_SCALE) * (1 / largest)
    inverse = step.reciprocal()
    codes = torch.mul(x, inverse).add_(0.5 - low * inverse).floor_()
    middle = codes.new_tensor(largest / 2) if symmetric else fold(codes, inner) * share
    centre = torch.zeros_like(low) if symmetric else fold(x, inner) * share
    codes -= middle
    spread = fold(codes.square(), inner)
    slope = torch.where(spread > 0, fold(codes * (x - centre), inner) / spread, step)
    least = centre - middle * slope
    inwards = (least - low).clamp_min(0), (high - (least + largest * slope)).clamp_min(0)  # few values may fit wider
    return low + fit * inwards[0], high - fit * inwards[1]


def fold(x: Tensor, dim: int) -> Tensor:
    """Sum along `dim`, which stays with size 1, in a fixed order.

    Zeros fill it up to a power of two; then the second half is added to the first, until one is left.
    """
    size = 1 << max(0, x.shape[dim] - 1).bit_length()
    if missing := size - x.shape[dim]:
        x = torch.cat([x, x.new_zeros(_sizes(x, dim, missing))], dim)
    while size > 1:
        size //= 2
        x = x.narrow(dim, 0, size) + x.narrow(dim, size, size)
    return x


def dequantize(
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor | None,
    bits: int,
    dim: int,
    out: Tensor,
    *,
    group_size: int | None = None,
) -> None:
    """Write `codes * scale + minimum` into `out` [..., T, D] (any float dtype, may be strided)."""
    spread = scale.float()
    least = spread * (((1 << bits) - 1) / -2) if minimum is None else minimum.float()
    if group_size is not None and scale.shape[dim] > 1:
        spread, least = (
            part.repeat_interleave(group_size, dim).narrow(dim, 0, codes.shape[dim]) for part in (spread, least)
        )
    values = codes.to(torch.float32)
    target = out if out.dtype == torch.float32 else values
    torch.mul(values, spread, out=target).add_(least)
    if target is not out:
        out.copy_(values)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., D] -> bytes [..., ceil(D / 8) * bits at most]; nothing is wasted when D % 8 == 0.

    4 and 2 bits: the halves (quarters) of the head dimension side by side in a byte, so that unpacking writes
    runs. 3 bits: a 2-bit plane of the low bits, then a 1-bit plane of the high ones.
    """
    if bits == 8:
        return codes
    if bits == 3:
        codes = _padded(codes, 8)
        return torch.cat([_interleave(codes & 3, 2), _interleave(codes >> 2, 1)], -1)
    return _interleave(_padded(codes, 8 // bits), bits)


def unpack(packed: Tensor, bits: int, dim_size: int) -> Tensor:
    """The inverse of `pack`: uint8 codes [..., dim_size]."""
    if bits == 8:
        return packed
    if bits == 3:
        low = packed.shape[-1] * 2 // 3
        codes = _separate(packed[..., :low], 2) | (_separate(packed[..., low:], 1) << 2)
    else:
        codes = _separate(packed, bits)
    return codes[..., :dim_size]


@lru_cache(maxsize=16)
def hadamard(dim: int, device: torch.device) -> Tensor:
    """Rotation [D, D] of the head dimension that spreads outlying channels: it is its own inverse.

    Hadamard matrices of the largest power of two in `dim`, along the diagonal (QuaRot, arXiv 2404.00456).
    """
    block = torch.ones(1, 1, dtype=torch.float64)
    while dim % (2 * len(block)) == 0:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    block = block / len(block) ** 0.5
    return torch.block_diag(*[block] * (dim // len(block))).to(device, torch.float32)


def rotate(x: Tensor) -> Tensor:
    """`x @ hadamard(D)` for float32 `x` [..., D] in a fixed order: butterflies of distance 1, 2, 4, ..."""
    size = x.shape[-1]
    block = size & -size
    y = x.reshape(-1, block).t().contiguous()  # [block, *]: runs of memory at every distance
    distance = 1
    while distance < block:
        lower, upper = y.view(-1, 2, distance, y.shape[1]).unbind(1)
        y = torch.stack([lower + upper, lower - upper], 1).view(block, -1)
        distance *= 2
    return (y * block**-0.5).t().reshape(x.shape)


def _round_up(scale: Tensor) -> Tensor:
    return (scale * (1 + 2 * FP16_STEP)).clamp_min(SMALLEST_SCALE).to(torch.float16)


def _sizes(x: Tensor, dim: int, size: int) -> list[int]:
    sizes = list(x.shape)
    sizes[dim] = size
    return sizes


def _padded(codes: Tensor, multiple: int) -> Tensor:
    missing = -codes.shape[-1] % multiple
    return torch.nn.functional.pad(codes, (0, missing)) if missing else codes


def _interleave(codes: Tensor, bits: int) -> Tensor:
    parts = codes.chunk(8 // bits, -1)
    packed = parts[0].clone()
    for index, part in enumerate(parts[1:], 1):
        packed |= part << (bits * index)
    return packed


def _separate(packed: Tensor, bits: int) -> Tensor:
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (bits * index)) & mask for index in range(8 // bits)], -1)
