"""How tensors lie in memory, as kernels need it."""

from torch import Tensor

from qkvshare_kernels.attention import Packed

SIDE_NUMBERS = 8


def norm(size: int) -> float:
    """Factor of the rotation (`reference.rotate`)."""
    return float((size & -size) ** -0.5)


def row_bytes(size: int, bits: int) -> int:
    """Bytes of a token's packed head (`reference.pack`)."""
    return -(-size // 8) * 3 if bits == 3 else -(-size * bits // 8)


def four(x: Tensor) -> Tensor:
    """[..., H, T, D] as [L, H, T, D]."""
    if x.dim() == 4:
        return x
    return x.reshape(*[1] * (4 - x.dim()), *x.shape) if x.dim() < 4 else x.reshape(-1, *x.shape[-3:])


def viewed(out: Tensor) -> Tensor | None:
    """The same memory as [L, H, T, D] with D in one run, or None where there is no such view."""
    if (out.stride(-1) != 1 and out.shape[-1] != 1) or not 2 <= out.dim() <= 4:
        return None
    return out if out.dim() == 4 else out.view(*[1] * (4 - out.dim()), *out.shape)


def units(codes: Tensor, scale: Tensor, minimum: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    """The packed tensors with heads at one distance each, and these distances (codes; scale and minimum) in elements.

    The first tokens of a page stay where they are; what lies otherwise is copied.
    """
    codes, codes_stride = _unit(codes)
    scale, scale_stride = _unit(scale)
    if minimum is not None:
        minimum, stride = _unit(minimum)
        if stride != scale_stride:
            minimum, scale = minimum.contiguous(), scale.contiguous()
            scale_stride = scale.shape[-1] * scale.shape[-2]
    return codes, scale, minimum, codes_stride, scale_stride


def _unit(x: Tensor) -> tuple[Tensor, int]:
    if x.is_contiguous():  # a whole page
        return x, x.shape[-1] * x.shape[-2]
    rows = x.stride(-1) == 1 and x.stride(-2) == x.shape[-1]
    even = all(x.stride(i) == x.shape[i + 1] * x.stride(i + 1) for i in range(x.dim() - 3))
    if x.dim() == 2 or not rows or not even:
        x = x.contiguous()
        return x, x.shape[-1] * x.shape[-2]
    return x, x.stride(-3)


def side(x: Packed, group: str) -> list[int] | None:
    """Where keys or values of one page and layer are: addresses of codes, scale, minimum (0 if symmetric), distances of
    heads for codes and scales in elements, bits, group, rotated. None if grouped otherwise or not in runs."""
    tensors = [x.codes, x.scale, *([] if x.minimum is None else [x.minimum])]
    rows = all(t.stride(-1) == 1 and (t.stride(-2) == t.shape[-1] or t.shape[-2] == 1) for t in tensors)
    if x.group != group or not rows or (x.minimum is not None and x.minimum.stride(0) != x.scale.stride(0)):
        return None
    size = x.group_size or (1 << 30 if group == "channel" else x.dim)
    addresses = [t.data_ptr() for t in tensors] + [0] * (x.minimum is None)
    return [*addresses, x.codes.stride(0), x.scale.stride(0), x.bits, min(size, 1 << 30), int(x.rotated)]
