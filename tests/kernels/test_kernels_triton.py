"""The Triton kernels, by Triton's interpreter (conftest sets TRITON_INTERPRET before anything imports triton)."""

import os
import subprocess
import sys

import pytest
import torch
from kernel_cases import (
    FORMS,
    assert_agree,
    assert_attends,
    assert_turns,
    dequantized_then_sdpa,
    edge_cases,
    history,
    noise,
)

from qkvshare_agents.kv import codec
from qkvshare_agents.kv.page import preset, seal
from qkvshare_agents.kv.span import Block, Span
from qkvshare_kernels import backend, plain
from qkvshare_kernels.attention import PackedPages

pytest.importorskip("triton", reason="triton is not installed; the extra 'dev' brings it on Linux")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN that was put there
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are full of NaN (0xFF in bytes) before each launch: what a kernel doesn't write shows."""
    from qkvshare_kernels import triton_kernels

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, 255 if dtype == torch.uint8 else torch.nan, dtype=dtype, device=device)

    monkeypatch.setattr(triton_kernels, "empty", empty)


@pytest.fixture(scope="module")
def kernels() -> backend.Kernels:
    return backend.kernels(CPU, "triton")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("size", "tokens", "heads"),
    [
        (64, 1, 1),
        (64, 63, 3),
        (64, 64, 2),
        (64, 65, 1),
        (80, 65, 2),
        (96, 60, 1),
        (128, 64, 1),
        (256, 64, 1),
        (12, 5, 8),
    ],
)
def test_kernels_equal_the_reference(kernels: backend.Kernels, form: str, size: int, tokens: int, heads: int) -> None:
    assert_agree(kernels, noise(heads, tokens, size), FORMS[form])


@pytest.mark.parametrize("form", ["keys 8", "values 4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(kernels: backend.Kernels, form: str, dtype: torch.dtype) -> None:
    assert_agree(kernels, noise(2, 64, 64, dtype), FORMS[form])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 65])
def test_turns(kernels: backend.Kernels, tokens: int, dtype: torch.dtype) -> None:
    assert_turns(kernels, tokens, dtype, 2**-7 if dtype == torch.bfloat16 else 0)  # the interpreter truncates to it


@pytest.mark.parametrize("name", edge_cases())
@pytest.mark.parametrize("form", ["keys 8 as they are", "values 8", "keys 4", "values 4", "values 3", "channels 2"])
def test_edge_cases_are_equal_too(kernels: backend.Kernels, name: str, form: str) -> None:
    x = edge_cases()[name][:1, :1]
    try:
        plain.quantize(x, **FORMS[form])
    except ValueError:
        with pytest.raises(ValueError, match="magnitudes"):
            kernels.quantize(x, **FORMS[form])
    else:
        assert_agree(kernels, x, FORMS[form])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("form", ["keys 8", "values 8", "keys 4", "values 4"])
def test_what_fp16_cant_hold_is_refused(kernels: backend.Kernels, form: str, bad: float) -> None:
    x = noise(1, 64, 64).clone()
    x[-1, -1, -1, -1] = bad
    with pytest.raises(ValueError, match="NaN, Inf or magnitudes beyond 65,504"):
        kernels.quantize(x, **FORMS[form])


def test_offsets_beyond_32_bits(kernels: backend.Kernels) -> None:
    """Little of a large cache is touched: its second layer begins 1.2 * 2**31 bytes after the first."""
    cache = torch.empty(2, 1, 20 * 2**20, 64, dtype=torch.float16)[:, :, -64:]
    cache.copy_(noise(1, 64, 64))
    assert cache.stride(0) > 2**30
    packed = kernels.quantize(cache, **FORMS["keys 4"])
    kernels.dequantize(*packed, 4, -2, cache, rotate=True)
    expected = torch.empty(2, 1, 64, 64)
    plain.dequantize(*packed, 4, -2, expected, rotate=True)
    assert (cache.float() - expected).norm() / expected.norm() < 1e-3


def test_long_groups_go_another_way(kernels: backend.Kernels) -> None:
    """More tokens than a program can hold share a channel's scale."""
    assert_agree(kernels, noise(1, 300, 64), FORMS["keys 8"])


@pytest.mark.parametrize(
    ("size", "heads", "groups", "tokens"),
    [(64, 1, 1, 1), (64, 2, 3, 300), (80, 3, 7, 65), (96, 2, 3, 64), (128, 8, 1, 63), (256, 1, 7, 200)],
)
def test_attention_is_dequantize_then_sdpa(
    kernels: backend.Kernels, size: int, heads: int, groups: int, tokens: int
) -> None:
    assert_attends(kernels, size, heads, groups, tokens, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_in_half_precision(kernels: backend.Kernels, dtype: torch.dtype) -> None:
    assert_attends(kernels, 64, 3, 3, 130, dtype)


def test_attention_over_packed_pages_alone(kernels: backend.Kernels) -> None:
    pages, query = history(2, 64, 600, [(4, 4)]), torch.randn(6, 64)
    got = kernels.attention(query, pages, [], 0.125)
    torch.testing.assert_close(got, dequantized_then_sdpa(query, pages, []), rtol=1e-4, atol=1e-5)
    long = PackedPages()
    long.append(codec.encode(torch.randn(2, 200, 64), 4, "channel"), codec.encode(torch.randn(2, 200, 64), 4, "token"))
    got = kernels.attention(query, long, [], 0.125)
    torch.testing.assert_close(got, dequantized_then_sdpa(query, long, []), rtol=1e-4, atol=1e-5)


def test_the_codec_runs_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page sealed by Triton is the page sealed by torch."""
    keys, values = noise(2, 64, 64), noise(2, 64, 64, seed=1)
    pages = []
    for name in ("triton", "torch"):
        monkeypatch.setenv("QKVSHARE_KERNELS", name)
        assert codec.kernels_name(CPU) == name
        span = Span(64, (Block((0, 1), keys, values),))
        pages.append(seal(span, preset("compact"), starts_sequence=True))
    for a, b in zip(*(page.parts for page in pages), strict=True):
        assert len(a.tensors()) == len(b.tensors()) > 2
        assert all(torch.equal(p, q) for p, q in zip(a.tensors(), b.tensors(), strict=True))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from qkvshare_kernels import triton_attention, triton_codec

def ptx(kernel, pointers, floats, constants, fusion):
    names = kernel.arg_names
    types = {n: "i64" if "stride" in n else "i32" for n in names}
    types |= pointers | dict.fromkeys(floats, "fp32") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=types, constexprs={(names.index(n),): v for n, v in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": fusion}).asm["ptx"]

packed = {"codes_ptr": "*u8", "scale_ptr": "*fp16", "minimum_ptr": "*fp16"}
half = dict(D=64, ROW=32, BITS=4)
quantize = ptx(
    triton_codec.quantize_kernel, packed | {"x_ptr": "*bf16"},
    ["norm", "largest", "share", "twice", "count_share", "fit"],
    half | dict(CHANNEL=True, SYMMETRIC=False, GROUP=64, FIT=True, BLOCK=6, TOKENS=64, ROWS=64, COLUMNS=64, GROUPS=1,
                SLOT=64, BYTES=32, LEVELS=6), False)
dequantize = ptx(
    triton_codec.dequantize_kernel, packed | {"out_ptr": "*bf16"}, ["norm", "middle"],
    half | dict(CHANNEL=True, SYMMETRIC=False, GROUP=1 << 30, BLOCK=6, ROWS=64, COLUMNS=64), False)
attention = ptx(
    triton_attention.attention_kernel,
    {"query_ptr": "*fp32", "table_ptr": "*i64", "greatest_ptr": "*fp32", "total_ptr": "*fp32", "sum_ptr": "*fp32"},
    ["middle_k", "middle_v"],
    dict(QUERIES=3, PADDED=16, DK=64, DV=64, COLUMNS_K=64, COLUMNS_V=64, ROW_K=32, ROW_V=32, BITS_K=4, BITS_V=4,
         GROUP_K=1 << 30, GROUP_V=64, SYMMETRIC_K=False, SYMMETRIC_V=True, TOKENS=128, PER_PROGRAM=4, NUMBERS=8), True)
print([(text.count("fma.rn"), text.count("div.full"), text.count("div.approx")) for text in (quantize, dequantize)])
print(len(attention) > 1000)
"""


def test_they_compile_for_a_gpu(tmp_path: object) -> None:
    """No GPU is needed for that. The codec rounds as stated there: no fused multiply-add, no approximate division."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.splitlines() == ["[(0, 0, 0), (0, 0, 0)]", "True"], done.stderr
