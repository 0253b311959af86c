"""[..., H, T, D] tensor <-> small integers.

Keys have channels with an offset and a range of their own, so a group runs along the tokens of a page (*per
channel*, KIVI, arXiv 2402.02750); values have not, so a group runs along one token's head (*per token*).
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from qkvshare_agents.errors import CodecError, InvalidSetting
from qkvshare_kernels import backend

Group = Literal["channel", "token"]
WIDTHS = (8, 4, 3, 2)
_GROUP_DIM: dict[Group, int] = {"channel": -2, "token": -1}


@dataclass(frozen=True)
class Encoded:
    """A tensor [..., H, T, D] in packed form.

    codes: uint8 [..., H, T, ceil(D * bits / 8)]. scale, minimum (None if symmetric): fp16, [..., H, G, D] per
    channel or [..., H, T, G] per token. dim: D. group_size: values in a group, None for all along the grouped
    axis. rotated: the head dimension was rotated before grouping, so that decoding rotates it back.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    bits: int
    group: Group
    dim: int
    group_size: int | None = None
    rotated: bool = False

    def __post_init__(self) -> None:
        _check_width(self.bits)

    @property
    def tokens(self) -> int:
        return self.codes.shape[-2]

    def head(self, tokens: int) -> "Encoded":
        """The first `tokens` tokens as views of the same bytes (groups along tokens keep their scale)."""
        if tokens == self.tokens:
            return self
        scale, minimum = self.scale, self.minimum
        if self.group == "token":
            scale = scale[..., :tokens, :]
            minimum = minimum if minimum is None else minimum[..., :tokens, :]
        codes = self.codes[..., :tokens, :]
        return Encoded(codes, scale, minimum, self.bits, self.group, self.dim, self.group_size, self.rotated)

    def layer(self, index: int) -> "Encoded":
        """One layer of a stack [L, H, T, D]: [H, T, D], views of the same bytes."""
        minimum = None if self.minimum is None else self.minimum[index]
        return replace(self, codes=self.codes[index], scale=self.scale[index], minimum=minimum)

    def rows(self, wanted: list[int], device: torch.device) -> "Encoded":
        """Copies of some layers of a stack [L, H, T, D], on a device."""
        codes, scale = (x[wanted].to(device) for x in (self.codes, self.scale))
        minimum = None if self.minimum is None else self.minimum[wanted].to(device)
        return replace(self, codes=codes, scale=scale, minimum=minimum)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.codes, self.scale) if self.minimum is None else (self.codes, self.scale, self.minimum)


def encode(
    x: Tensor,
    bits: int,
    group: Group,
    *,
    group_size: int | None = None,
    symmetric: bool = False,
    rotate: bool = False,
    fit: float = 0.0,
) -> Encoded:
    """Quantize `x` [..., H, T, D] (fp32, fp16 or bf16; T >= 1) to `bits`.

    Without `fit`, the largest error (of the rotated values, if rotated) is half a step: (max - min) / (2**bits - 1) /
    2 of the group, plus fp16 rounding of scale and minimum. fit: how far (0 to 1) scale and minimum go from the
    group's range towards the least squares fit, which has a smaller mean error and clamps outlying values.
    Raises CodecError for an unknown width, NaN or Inf, or values that would decode to more than fp16 holds (65,504).
    """
    _check_width(bits)
    if x.shape[-2] == 0:
        raise CodecError("nothing to encode: the tensor holds no token")
    if group_size is not None and group_size < 1:
        raise CodecError(f"group_size must be at least 1, not {group_size}")
    kernels, dim = _kernels(x.device), _GROUP_DIM[group]
    try:
        packed, scale, minimum = kernels.quantize(
            x, bits, dim, symmetric=symmetric, group_size=group_size, fit=fit, rotate=rotate
        )
    except ValueError as error:
        raise CodecError(str(error)) from error
    return Encoded(packed, scale, minimum, bits, group, x.shape[-1], group_size, rotate)


def decode_into(encoded: Encoded, out: Tensor) -> None:
    """Dequantize into `out` [..., H, T, D], a view of the reader's own cache: no intermediate copy stays."""
    if out.shape != (*encoded.codes.shape[:-1], encoded.dim):
        raise CodecError(f"{(*encoded.codes.shape[:-1], encoded.dim)} values do not fit into {tuple(out.shape)}")
    _kernels(out.device).dequantize(
        encoded.codes,
        encoded.scale,
        encoded.minimum,
        encoded.bits,
        _GROUP_DIM[encoded.group],
        out,
        group_size=encoded.group_size,
        rotate=encoded.rotated,
    )


def kernels_name(device: torch.device) -> str:
    """Which kernels encode and decode tensors on `device` now: `triton`, `cpu` or `torch`."""
    return _kernels(device).name


def prepare(device: torch.device) -> None:
    """Begin to build what makes the codec fast on `device`, behind the caller's back; until then it works without.

    Raises InvalidSetting if $QKVSHARE_KERNELS names kernels that can't run here.
    """
    try:
        backend.prepare(device)
    except backend.KernelsUnavailable as error:
        raise InvalidSetting(str(error)) from error


def _kernels(device: torch.device) -> backend.Kernels:
    try:
        return backend.kernels(device)
    except backend.KernelsUnavailable as error:
        raise InvalidSetting(str(error)) from error


def encoded_bytes(
    heads: int,
    tokens: int,
    dim: int,
    bits: int,
    group: Group,
    *,
    group_size: int | None = None,
    symmetric: bool = False,
) -> int:
    """What `encode` of a tensor [heads, tokens, dim] keeps: codes, scales and minima."""
    unit = {8: 1, 4: 2, 3: 8, 2: 4}[bits]  # values that are packed together
    row = -(-dim // unit) * unit * bits // 8
    along, across = (tokens, dim) if group == "channel" else (dim, tokens)
    scales = across * -(-along // (group_size or along))
    return heads * (tokens * row + scales * (2 if symmetric else 4))


def _check_width(bits: int) -> None:
    if bits not in WIDTHS:
        raise CodecError(f"no {bits}-bit codec; the widths are {WIDTHS}")
