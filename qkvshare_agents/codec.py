"""[..., H, T, D] tensor <-> small integers.

Keys have channels with an offset and a range of their own, so a group runs along the tokens of a page (*per
channel*, KIVI, arXiv 2402.02750); values have not, so a group is one token's head (*per token*) and needs no
minimum at 8 bits.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qkvshare_agents.errors import CodecError
from qkvshare_kernels import reference

Group = Literal["channel", "token"]
WIDTHS = (8,)
_LARGEST = torch.finfo(torch.float16).max
_GROUP_DIM: dict[Group, int] = {"channel": -2, "token": -1}


@dataclass(frozen=True)
class Encoded:
    """A tensor in packed form.

    codes: uint8 or int8 [..., H, T, D] (at 8 bits). scale, minimum: fp16, size 1 along the grouped axis.
    rotated: the head dimension was rotated before grouping, so that decoding rotates it back.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    bits: int
    rotated: bool = False

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS:
            raise CodecError(f"no {self.bits}-bit codec; the widths are {WIDTHS}")

    @property
    def tokens(self) -> int:
        return self.codes.shape[-2]

    def head(self, tokens: int) -> "Encoded":
        """The first `tokens` tokens as views of the same bytes (groups along tokens keep their scale)."""
        if tokens == self.tokens:
            return self
        parts = (self.scale, self.minimum)
        scale, minimum = (p if p is None or p.shape[-2] == 1 else p[..., :tokens, :] for p in parts)
        assert scale is not None
        return Encoded(self.codes[..., :tokens, :], scale, minimum, self.bits, self.rotated)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.codes, self.scale) if self.minimum is None else (self.codes, self.scale, self.minimum)


def encode(x: Tensor, bits: int, group: Group, *, symmetric: bool = False, rotate: bool = False) -> Encoded:
    """Quantize `x` [..., H, T, D] (fp32, fp16 or bf16; T >= 1) to `bits`.

    The largest error (of the rotated values, if rotated) is half a step: (max - min) / (2**bits - 1) / 2 of the
    group, plus fp16 rounding of scale and minimum. Raises CodecError for an unknown width, NaN or Inf, or values
    that would decode to more than fp16 holds (65,504).
    """
    if bits not in WIDTHS:
        raise CodecError(f"no {bits}-bit codec; the widths are {WIDTHS}")
    if x.shape[-2] == 0:
        raise CodecError("nothing to encode: the tensor holds no token")
    values = x.float()
    if rotate:
        values = values @ reference.hadamard(x.shape[-1], x.device)
    codes, scale, minimum = reference.quantize(values, bits, _GROUP_DIM[group], symmetric=symmetric)
    levels = (1 << (bits - 1)) - 1 if minimum is None else (1 << bits) - 1
    reach = scale.float() * levels if minimum is None else minimum.float() + scale.float() * levels
    if not bool((reach.abs() <= _LARGEST).all()):  # also for NaN and Inf, which pass into scale or minimum
        raise CodecError(f"keys or values hold NaN, Inf or magnitudes beyond {_LARGEST:,.0f}")
    return Encoded(codes, scale, minimum, bits, rotate)


def decode_into(encoded: Encoded, out: Tensor) -> None:
    """Dequantize into `out` [..., H, T, D], a view of the reader's own cache: no intermediate copy stays."""
    if out.shape != encoded.codes.shape:
        raise CodecError(f"codes {tuple(encoded.codes.shape)} do not fit into {tuple(out.shape)}")
    if not encoded.rotated:
        reference.dequantize(encoded.codes, encoded.scale, encoded.minimum, out)
        return
    values = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    reference.dequantize(encoded.codes, encoded.scale, encoded.minimum, values)
    out.copy_(values @ reference.hadamard(out.shape[-1], out.device))
