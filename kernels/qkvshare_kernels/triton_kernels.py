"""The Triton kernels behind the common interface. Imported only where they were chosen (`backend`)."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from qkvshare_kernels import attention as plain_attention
from qkvshare_kernels import plain, triton_codec
from qkvshare_kernels.attention import Native, PackedPages
from qkvshare_kernels.layout import four, norm, row_bytes, units, viewed
from qkvshare_kernels.triton_attention import attend

_TILE_TOKENS = 64
_LONGEST_GROUP = 256  # tokens that share a channel's scale must fit into one program


class TritonKernels:
    """Same signatures as `plain`; forms the kernels don't know (long groups of tokens) go there."""

    name = "triton"

    def quantize(
        self,
        x: Tensor,
        bits: int,
        dim: int,
        *,
        symmetric: bool,
        group_size: int | None = None,
        fit: float = 0.0,
        rotate: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        group = min(group_size or x.shape[dim], x.shape[dim])
        channel = dim == -2
        if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or (channel and group > _LONGEST_GROUP):
            return plain.quantize(x, bits, dim, symmetric=symmetric, group_size=group_size, fit=fit, rotate=rotate)
        *lead, tokens, size = x.shape
        layers = four(x if x.stride(-1) == 1 else x.contiguous())
        count, row = -(-x.shape[dim] // group), row_bytes(size, bits)
        codes = empty((*lead, tokens, row), torch.uint8, x.device)
        shape = (*lead, count, size) if channel else (*lead, tokens, count)
        scale = empty(shape, torch.float16, x.device)
        minimum = None if symmetric else empty(shape, torch.float16, x.device)
        tile = group if channel else min(_TILE_TOKENS, tokens)
        largest = (1 << bits) - 1
        grid = (layers.shape[0] * layers.shape[1], triton.cdiv(tokens, tile))
        with _on(x.device):
            triton_codec.quantize_kernel[grid](
                layers, codes, scale, scale if minimum is None else minimum, layers.shape[1], tokens,
                *layers.stride()[:3], norm(size), float(largest), 1 / largest, 2 / largest, 1 / group, fit, D=size,
                ROW=row, BITS=bits, CHANNEL=channel, SYMMETRIC=symmetric, GROUP=group, FIT=fit != 0,
                BLOCK=_levels(size) if rotate else 0, TOKENS=tile, ROWS=_power(tile), COLUMNS=_power(size),
                GROUPS=1 if channel else _power(count), SLOT=_power(group), BYTES=_power(row),
                LEVELS=_power(group).bit_length() - 1, enable_fp_fusion=False,
            )  # fmt: skip
        plain.refuse_what_fp16_cant_hold(scale, minimum, bits)
        return codes, scale, minimum

    def dequantize(
        self,
        packed: Tensor,
        scale: Tensor,
        minimum: Tensor | None,
        bits: int,
        dim: int,
        out: Tensor,
        *,
        group_size: int | None = None,
        rotate: bool = False,
    ) -> None:
        native = viewed(out)
        if native is None:
            plain.dequantize(packed, scale, minimum, bits, dim, out, group_size=group_size, rotate=rotate)
            return
        if not out.numel():
            return
        *_, tokens, size = out.shape
        packed, scale, minimum, codes_stride, scale_stride = units(packed, scale, minimum)
        group = group_size or (1 << 30 if dim == -2 else size)
        rows = min(_TILE_TOKENS, _power(tokens))
        grid = (native.shape[0] * native.shape[1], triton.cdiv(tokens, rows))
        with _on(out.device):
            triton_codec.dequantize_kernel[grid](
                packed, scale, scale if minimum is None else minimum, native, native.shape[1], tokens,
                *native.stride()[:3], codes_stride, scale_stride, norm(size), ((1 << bits) - 1) / -2, D=size,
                ROW=packed.shape[-1], BITS=bits, CHANNEL=dim == -2, SYMMETRIC=minimum is None, GROUP=group,
                BLOCK=_levels(size) if rotate else 0, ROWS=rows, COLUMNS=_power(size), enable_fp_fusion=False,
            )  # fmt: skip

    def attention(self, query: Tensor, packed: PackedPages, native: Sequence[Native], scaling: float) -> Tensor:
        with _on(query.device):
            parts = attend(query, packed, scaling, empty)
        if parts is None:
            return plain_attention.attention(query, packed, native, scaling)
        return plain_attention.join(query, [*parts, *plain_attention.read_native(query, native, scaling)])

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor, first: int, interleaved: bool) -> None:
        native, tokens, pairs = viewed(x), x.shape[-2], cos.shape[-1]
        if native is None or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            plain.turn(x, cos, sin, first, interleaved)
            return
        if not x.numel():
            return
        rows = min(_TILE_TOKENS, _power(tokens))
        with _on(x.device):
            triton_codec.turn_kernel[(native.shape[0] * native.shape[1], triton.cdiv(tokens, rows))](
                native, cos.contiguous(), sin.contiguous(), native.shape[1], tokens, *native.stride()[:3], FIRST=first,
                PAIRS=pairs, INTERLEAVED=interleaved, ROWS=rows, COLUMNS=_power(pairs), enable_fp_fusion=False,
            )  # fmt: skip


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that a kernel writes completely."""
    return torch.empty(shape, dtype=dtype, device=device)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _levels(size: int) -> int:
    return (size & -size).bit_length() - 1


def _on(device: torch.device) -> Any:
    """Kernels start on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
