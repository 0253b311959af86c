"""What the kernels' tests share: values, forms, and what must be equal."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qkvshare_agents.kv.codec import encode
from qkvshare_kernels import attention, backend, plain
from qkvshare_kernels.attention import PackedPages

HEAD_SIZES = (64, 80, 96, 128, 256, 12, 7)
# What presets do with keys and values at each width, and forms that nothing forbids
FORMS: dict[str, dict[str, Any]] = {
    "keys 8": {"bits": 8, "dim": -2, "symmetric": False, "rotate": True},
    "keys 8 as they are": {"bits": 8, "dim": -2, "symmetric": False},
    "values 8": {"bits": 8, "dim": -1, "symmetric": True, "group_size": 64},
    "keys 4": {"bits": 4, "dim": -2, "symmetric": False, "rotate": True, "fit": 0.5},
    "values 4": {"bits": 4, "dim": -1, "symmetric": True, "group_size": 64, "rotate": True, "fit": 1.0},
    "keys 3": {"bits": 3, "dim": -2, "symmetric": False, "rotate": True, "fit": 0.5, "group_size": 32},
    "values 3": {"bits": 3, "dim": -1, "symmetric": False, "group_size": 48, "rotate": True, "fit": 1.0},
    "values 2": {"bits": 2, "dim": -1, "symmetric": True, "group_size": 64, "rotate": True, "fit": 1.0},
    "channels 2": {"bits": 2, "dim": -2, "symmetric": True, "fit": 0.3, "group_size": 16},
}


def noise(heads: int, tokens: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """[2, H, T, D] as a part of a larger cache, with an offset and a range per channel, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randn(2, heads, tokens + 9, size, generator=generator)
    cache = cache * (torch.rand(2, heads, 1, size, generator=generator) * 4 + 0.1)
    return (cache + 3 * torch.randn(2, heads, 1, size, generator=generator)).to(dtype)[:, :, 5 : 5 + tokens]


def assert_same(got: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Equal shapes and bytes: -0.0 is not 0.0 here."""
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.shape == b.shape and a.dtype == b.dtype
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_agree(kernels: backend.Kernels, x: Tensor, form: dict[str, Any]) -> None:
    """Codes, scales and minima bit for bit; decoded into memory full of NaN, and nothing beside it is written."""
    packed = plain.quantize(x, **form)
    assert_same(kernels.quantize(x, **form), packed)
    rest = {k: form[k] for k in ("group_size", "rotate") if k in form}
    results = []
    for each in (kernels, plain):
        cache = torch.full((*x.shape[:2], x.shape[2] + 3, x.shape[3]), torch.nan, dtype=x.dtype)
        each.dequantize(*packed, form["bits"], form["dim"], cache[:, :, 1:-2], **rest)
        assert torch.isnan(cache[:, :, :1]).all() and torch.isnan(cache[:, :, -2:]).all()
        results.append(cache[:, :, 1:-2])
    if form.get("rotate"):  # here plain multiplies with the matrix
        distance = (results[0].double() - results[1].double()).norm()
        assert distance <= (1e-6 if x.dtype == torch.float32 else 5e-3) * results[1].double().norm()
    else:
        assert torch.equal(*results)


def assert_turns(kernels: backend.Kernels, tokens: int, dtype: torch.dtype, step: float = 0.0) -> None:
    """As plain torch does, bit for bit (or to a relative `step`), and nothing beside the turned values is written."""
    for size, first, pairs in ((64, 0, 32), (128, 96, 16), (80, 0, 10), (256, 0, 64), (12, 3, 1), (7, 0, 3)):
        for interleaved in (False, True):
            x = noise(2, tokens, size, dtype, seed=size)
            angles = torch.linspace(-900, 900, tokens * pairs).view(tokens, pairs).double()
            cos, sin = angles.cos().float(), angles.sin().float()
            got, expected = (torch.full((2, 2, tokens + 3, size), torch.nan, dtype=dtype) for _ in range(2))
            for each, cache in ((kernels, got), (plain, expected)):
                cache[:, :, 1:-2] = x
                each.turn(cache[:, :, 1:-2], cos, sin, first, interleaved)
            if step:
                torch.testing.assert_close(got, expected, rtol=step, atol=1e-6, equal_nan=True)
            else:
                assert_same([got], [expected])
            assert torch.equal(got[:, :, 1:-2, :first], x[..., :first])
            assert not torch.equal(got[:, :, 1:-2], x) or tokens == 0


def edge_cases() -> dict[str, Tensor]:
    x = noise(2, 64, 64).clone()
    outlier = x.clone()
    outlier[0, 0, 7, 9] = 3e4
    return {
        "constant": torch.full_like(x, 3.7),
        "zeros": torch.zeros_like(x),
        "negative zeros": -torch.zeros_like(x),
        "zeros of both signs": torch.zeros_like(x).copysign(x),
        "constant per channel": torch.arange(64.0).expand_as(x).clone(),
        "one outlier": outlier,
        "tiny": 1e-6 * x,
        "large": x.sign() * 6e4,
    }


def history(heads: int, size: int, tokens: int, widths: Sequence[tuple[int, int]], value_size: int = 0) -> PackedPages:
    """Pages of 64 tokens whose widths take turns; the last page is the first tokens of a longer one."""
    torch.manual_seed(size)
    pages, value_size = PackedPages(), value_size or size
    for number, start in enumerate(range(0, tokens, 64)):
        bits_k, bits_v = widths[number % len(widths)]
        keys = torch.randn(heads, 64, size) + 2 * torch.randn(heads, 1, size)
        packed = (
            encode(keys, bits_k, "channel", rotate=number % 2 == 0),
            encode(
                torch.randn(heads, 64, value_size),
                bits_v,
                "token",
                symmetric=True,
                group_size=64 if value_size % 64 == 0 else None,
                rotate=bits_v < 8,
            ),
        )
        pages.append(*(side.head(min(64, tokens - start)) for side in packed))
    return pages


def dequantized_then_sdpa(query: Tensor, pages: PackedPages, native: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    keys = torch.cat([*(attention.unpacked(k, query) for k, _ in pages.pages), *(k.float() for k, _ in native)], 1)
    values = torch.cat([*(attention.unpacked(v, query) for _, v in pages.pages), *(v.float() for _, v in native)], 1)
    grouped = query.float().view(1, keys.shape[0], -1, query.shape[-1])
    out = torch.nn.functional.scaled_dot_product_attention(grouped, keys[None], values[None])
    return out[0].flatten(0, 1)


def assert_attends(
    kernels: backend.Kernels, size: int, heads: int, groups: int, tokens: int, dtype: torch.dtype
) -> None:
    pages = history(heads, size, tokens, [(8, 8), (4, 4), (4, 2), (3, 2)])
    native = [tuple(torch.randn(heads, n, size).to(dtype) for _ in range(2)) for n in (4, 7, 0)]
    query = (3 * torch.randn(heads * groups, size)).to(dtype)
    got = kernels.attention(query, pages, native, size**-0.5)  # type: ignore[arg-type]
    expected = dequantized_then_sdpa(query, pages, native)  # type: ignore[arg-type]
    assert got.dtype == dtype and got.shape == expected.shape
    distance = (got.float() - expected).norm() / expected.norm()
    assert distance < (1e-5 if dtype == torch.float32 else 2e-3 if dtype == torch.float16 else 1e-2)
