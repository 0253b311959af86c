"""Quantization stays within half a step, never wraps around, and refuses what it can't express."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkvshare_agents.errors import CodecError
from qkvshare_agents.kv.codec import Encoded, Group, decode_into, encode
from qkvshare_kernels import reference

HALF_TYPES = (torch.float16, torch.bfloat16)
# (group, symmetric): how keys and how values are stored, and the other two, which nothing forbids
FORMS: list[tuple[Group, bool]] = [("channel", False), ("token", True), ("token", False), ("channel", True)]
ROUNDING = 2.0**-10  # relative: outward rounding of a scale or minimum to fp16, and the rounding itself
L, H = 2, 3


def noise(tokens: int, size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """[L, H, T, D] with an offset and a range per channel, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(L, H, tokens, size, generator=generator)
    scale = torch.rand(L, H, 1, size, generator=generator) * 4 + 0.1
    return (x * scale + torch.randn(L, H, 1, size, generator=generator) * 10).to(dtype)


def round_trip(x: Tensor, group: Group, symmetric: bool, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """Encode and decode into memory that is full of NaN."""
    out = torch.full(x.shape, torch.nan, dtype=out_dtype)
    decode_into(encode(x, 8, group, symmetric=symmetric), out)
    return out


def half_step(x: Tensor, group: Group, symmetric: bool) -> Tensor:
    """The stated bound, computed without the code under test: half a step plus fp16 rounding."""
    x, dim = x.double(), -2 if group == "channel" else -1
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    if symmetric:
        step = torch.maximum(high, -low) / 127.5
    else:
        step = (high - low + low.abs() * 2 * ROUNDING + 2.0**-24) / 255
    step = (step * (1 + 2 * ROUNDING)).clamp_min(2.0**-14)
    return step / 2 + 1e-5 * step


def assert_within_half_a_step(x: Tensor, group: Group, symmetric: bool) -> None:
    error = (round_trip(x, group, symmetric).double() - x.double()).abs()
    worst = (error / half_step(x, group, symmetric)).max()
    # float32 arithmetic on large numbers has an error of its own
    slack = float(x.abs().max()) * 2.0**-22 / float(half_step(x, group, symmetric).min())
    assert worst <= 1 + slack, f"{worst} half steps"


@pytest.mark.parametrize(("group", "symmetric"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65])
@pytest.mark.parametrize("size", [64, 80, 96, 128])
def test_error_is_at_most_half_a_step(
    group: Group, symmetric: bool, dtype: torch.dtype, tokens: int, size: int
) -> None:
    assert_within_half_a_step(noise(tokens, size, dtype), group, symmetric)


@pytest.mark.parametrize(("group", "symmetric"), FORMS[:2])
def test_8_bits_are_as_precise_as_8_bits_are(group: Group, symmetric: bool) -> None:
    """The bound above would also hold for a codec that returned its input."""
    x = noise(64, 64)
    got = round_trip(x, group, symmetric)
    assert 1e-4 < float((got - x).norm() / x.norm()) < 1e-2
    dim = -2 if group == "channel" else -1
    distinct = got.movedim(dim, -1)[0, 0, 0].unique().numel()
    assert 32 < distinct <= 64


EDGE_CASES = {
    "zeros": torch.zeros(1, 1, 64, 64),
    "constant": torch.full((1, 1, 64, 64), 3.7),
    "constant negative": torch.full((1, 1, 64, 64), -1234.5),
    "constant per channel": torch.arange(64.0).expand(1, 1, 64, 64).clone(),
    "one outlier": torch.cat([noise(63, 64)[:1, :1], torch.eye(64)[None, None, 5:6] * 3e4], dim=2),
    "big offset, small range": 1000 + 0.01 * noise(64, 64)[:1, :1],
    "big negative offset": -30000 + 0.01 * noise(64, 64)[:1, :1],
    "tiny": 1e-6 * noise(64, 64)[:1, :1],
    "subnormal in fp16": 4e-8 * torch.rand(1, 1, 64, 64, generator=torch.Generator().manual_seed(0)),
    "subnormal in fp32": torch.full((1, 1, 64, 64), 1e-41),
    "largest": torch.tensor([-65000.0, 65000.0]).repeat(1, 1, 64, 32),
}  # fmt: skip


@pytest.mark.parametrize(("group", "symmetric"), FORMS)
@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases_stay_within_half_a_step(name: str, group: Group, symmetric: bool) -> None:
    assert_within_half_a_step(EDGE_CASES[name], group, symmetric)


def test_zeros_come_back_as_zeros_where_a_code_stands_for_zero() -> None:
    for group, symmetric in FORMS:
        got = round_trip(EDGE_CASES["zeros"], group, symmetric)
        assert got.abs().max() == (reference.SMALLEST_SCALE / 2 if symmetric else 0)


def test_an_outlier_spoils_only_its_own_group() -> None:
    x = noise(64, 64)
    spoilt = x.clone()
    spoilt[0, 0, 7, 9] = 3e4
    for group, symmetric in FORMS:
        clean, got = round_trip(x, group, symmetric), round_trip(spoilt, group, symmetric)
        changed = (clean != got).nonzero()
        index = 3 if group == "channel" else 2
        assert changed[:, index].unique().tolist() == [9 if group == "channel" else 7]


@pytest.mark.parametrize(("group", "symmetric"), FORMS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 65504 * 1.01, -65504 * 1.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_beyond_fp16_are_refused(group: Group, symmetric: bool, bad: float, dtype: torch.dtype) -> None:
    x = noise(64, 64, dtype)
    x[-1, -1, -1, -1] = bad
    with pytest.raises(CodecError, match="NaN, Inf or magnitudes beyond 65,504"):
        encode(x, 8, group, symmetric=symmetric)
    with pytest.raises(CodecError):
        encode(torch.full((1, 1, 64, 64), bad), 8, group, symmetric=symmetric)


@pytest.mark.parametrize(("group", "symmetric"), FORMS)
@pytest.mark.parametrize("size", [6e4, 65280.0, 65472.0, 65504.0])
def test_fp16_never_overflows_on_the_way_back(group: Group, symmetric: bool, size: float) -> None:
    """Scales are rounded up, so that the largest fp16 number would come back as infinity."""
    x = torch.tensor([-size, size, 0.0, 1.0], dtype=torch.float16).repeat(1, 1, 64, 16)
    try:
        got = round_trip(x.mT.contiguous() if group == "channel" else x, group, symmetric, torch.float16)
    except CodecError:
        assert size > 65000
    else:
        assert torch.isfinite(got).all()


@pytest.mark.parametrize("bits", [0, 1, 7, 9, 16, -8])
def test_an_unknown_width_names_the_valid_ones(bits: int) -> None:
    with pytest.raises(CodecError, match=rf"no {bits}-bit codec; the widths are \(8, 4, 3, 2\)"):
        encode(noise(64, 64), bits, "channel")
    good = encode(noise(64, 64), 8, "channel")
    with pytest.raises(CodecError, match=r"\(8, 4, 3, 2\)"):
        Encoded(good.codes, good.scale, good.minimum, bits, "channel", 64)


def test_no_token_is_refused() -> None:
    with pytest.raises(CodecError, match="no token"):
        encode(torch.empty(1, 1, 0, 64), 8, "channel")


@pytest.mark.parametrize(("group", "symmetric"), FORMS)
@pytest.mark.parametrize("tokens", [1, 2, 40, 63, 64])
def test_the_head_decodes_like_the_first_tokens_of_the_whole(group: Group, symmetric: bool, tokens: int) -> None:
    encoded = encode(noise(64, 80), 8, group, symmetric=symmetric)
    whole, out = torch.empty(L, H, 64, 80), torch.full((L, H, tokens, 80), torch.nan)
    decode_into(encoded, whole)
    head = encoded.head(tokens)
    decode_into(head, out)
    assert head.tokens == tokens
    assert torch.equal(out, whole[..., :tokens, :])
    assert head.codes.data_ptr() == encoded.codes.data_ptr(), "the head is a view"


@pytest.mark.parametrize(("group", "symmetric"), FORMS[:2])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
def test_decoding_into_a_strided_view_writes_there_and_nowhere_else(
    group: Group, symmetric: bool, dtype: torch.dtype
) -> None:
    encoded = encode(noise(64, 64), 8, group, symmetric=symmetric)
    expected = torch.empty(L, H, 64, 64)
    decode_into(encoded, expected)
    cache = torch.full((L, H, 200, 64), torch.nan, dtype=dtype)
    decode_into(encoded, cache[:, :, 100:164])
    assert torch.equal(cache[:, :, 100:164], expected.to(dtype))
    assert cache[:, :, :100].isnan().all() and cache[:, :, 164:].isnan().all()


def test_a_wrong_shape_is_refused() -> None:
    encoded = encode(noise(64, 64), 8, "channel")
    for shape in [(L, H, 63, 64), (L, H, 64, 65), (1, L, H, 64, 64), (H, 64, 64)]:
        with pytest.raises(CodecError, match="do not fit"):
            decode_into(encoded, torch.empty(shape))


@pytest.mark.parametrize(("group", "symmetric"), FORMS[:2])
def test_encoding_leaves_its_input_alone(group: Group, symmetric: bool) -> None:
    x = noise(64, 64)
    before = x.clone()
    encode(x, 8, group, symmetric=symmetric)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("group", "symmetric"), FORMS)
def test_a_strided_input_gives_the_codes_of_its_copy(group: Group, symmetric: bool) -> None:
    x = noise(200, 64)[:, :, 30:94]
    a, b = (encode(t, 8, group, symmetric=symmetric) for t in (x, x.contiguous()))
    assert all(torch.equal(s, t) for s, t in zip(a.tensors(), b.tensors(), strict=True))


def test_shapes_and_types_of_what_is_stored() -> None:
    keys = encode(noise(64, 80), 8, "channel")
    assert [(t.dtype, tuple(t.shape)) for t in keys.tensors()] == [
        (torch.uint8, (L, H, 64, 80)), (torch.float16, (L, H, 1, 80)), (torch.float16, (L, H, 1, 80)),
    ]  # fmt: skip
    values = encode(noise(64, 80), 8, "token", symmetric=True)
    assert [(t.dtype, tuple(t.shape)) for t in values.tensors()] == [
        (torch.uint8, (L, H, 64, 80)), (torch.float16, (L, H, 64, 1)),
    ]  # fmt: skip


finite = st.floats(-64000, 64000, width=32)
groups = st.one_of(
    st.lists(finite, min_size=1, max_size=70),
    st.builds(
        lambda offset, deltas, scale: [offset + d * scale for d in deltas],
        st.floats(-60000, 60000, width=32),
        st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=70),
        st.sampled_from([1e-7, 1e-4, 1e-2, 1.0, 100.0]),
    ),
)


@settings(max_examples=300, deadline=None)
@given(groups, st.sampled_from([2, 3, 4, 8]), st.booleans())
def test_codes_never_wrap_around(values: list[float], bits: int, symmetric: bool) -> None:
    """A code that wraps turns the largest value into the smallest: seen as an error of the whole range."""
    x = torch.tensor(values)[None]
    codes, scale, minimum = reference.quantize(x, bits, -1, symmetric=symmetric)
    assert int(codes.max()) <= 2**bits - 1
    assert torch.isfinite(scale).all() and (scale > 0).all()
    least = -(2.0**bits - 1) / 2 * scale.double() if minimum is None else minimum.double()
    decoded = codes.double() * scale.double() + least
    arithmetic = float(x.abs().max()) * 2.0**-21  # float32, three operations
    assert float((decoded - x.double()).abs().max()) <= float(scale) * 0.501 + arithmetic


@settings(max_examples=200, deadline=None)
@given(groups)
def test_order_is_kept(values: list[float]) -> None:
    """Larger inputs never decode to smaller outputs within a group."""
    x = torch.tensor(sorted(values))[None, None]
    for symmetric in (False, True):
        got = round_trip(x, "token", symmetric)
        assert (got.diff() >= 0).all()


@pytest.mark.parametrize("dim", [64, 128, 256, 96, 80, 12, 7])
def test_the_rotation_is_orthogonal_and_its_own_inverse(dim: int) -> None:
    rotation = reference.hadamard(dim, torch.device("cpu"))
    assert rotation.shape == (dim, dim)
    torch.testing.assert_close(rotation @ rotation, torch.eye(dim))


@pytest.mark.parametrize("dim", [64, 96, 80])
def test_rotated_keys_decode_to_where_they_were(dim: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, dim) + 5 * torch.randn(dim)
    encoded = encode(x, 8, "channel", rotate=True)
    out = torch.full_like(x, float("nan"))
    decode_into(encoded, out)
    assert encoded.rotated and encoded.head(10).rotated
    assert (out - x).norm() / x.norm() < 5e-3


def test_rotation_spreads_an_outlying_channel() -> None:
    """Why it is there: a channel with rare outliers costs its own group less once all channels share them."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 64, 64)
    x[0, 0, 7, 3] = 80.0
    errors = []
    for rotate in (False, True):
        out = torch.empty_like(x)
        decode_into(encode(x, 8, "channel", rotate=rotate), out)
        errors.append(float((out - x)[..., 3].abs().max()))
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 12, 7, 1])
def test_packing_loses_nothing_and_wastes_nothing(bits: int, dim: int) -> None:
    codes = torch.randint(0, 2**bits, (2, 3, 5, dim), dtype=torch.uint8, generator=torch.Generator().manual_seed(dim))
    packed = reference.pack(codes, bits)
    assert torch.equal(reference.unpack(packed, bits, dim), codes)
    if dim % 8 == 0:
        assert packed.numel() * 8 == codes.numel() * bits


@pytest.mark.parametrize(("group", "symmetric"), FORMS)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("group_size", [None, 1, 16, 32, 48, 1000])
@pytest.mark.parametrize("tokens", [1, 33, 60, 64])
def test_every_width_and_group_is_within_half_a_step(
    group: Group, symmetric: bool, bits: int, group_size: int | None, tokens: int
) -> None:
    """Ragged last groups included: each value errs by at most half of its own group's step."""
    x = noise(tokens, 80)
    encoded = encode(x, bits, group, group_size=group_size, symmetric=symmetric)
    out = torch.full_like(x, torch.nan)
    decode_into(encoded, out)
    dim, size = (-2, tokens) if group == "channel" else (-1, 80)
    width = min(group_size or size, size)
    assert encoded.scale.shape[dim] == -(-size // width)
    step = encoded.scale.float().repeat_interleave(width, dim).narrow(dim, 0, size)
    assert ((out - x).abs() <= 0.51 * step + 1e-3).all()
    half = max(1, tokens // 2)
    head = torch.full_like(x[..., :half, :], torch.nan)
    decode_into(encoded.head(half), head)
    assert torch.equal(head, out[..., :half, :])


@pytest.mark.parametrize("group", ["channel", "token"])
def test_each_group_has_its_own_range(group: Group) -> None:
    """An outlier spoils only its own group."""
    x = noise(64, 64) * 0.1
    x[..., 3, 3] = 100.0
    errors = []
    for group_size in (None, 16):
        out = torch.empty_like(x)
        decode_into(encode(x, 4, group, group_size=group_size), out)
        beside = (out - x)[..., 20:, 3] if group == "channel" else (out - x)[..., 3, 20:]
        errors.append(float(beside.abs().mean()))
    assert errors[1] < errors[0] / 10


def test_fewer_bits_take_fewer_bytes_and_err_more() -> None:
    x, sizes, errors = noise(64, 64), [], []
    for bits in (8, 4, 3, 2):
        encoded = encode(x, bits, "channel")
        out = torch.empty_like(x)
        decode_into(encoded, out)
        sizes.append(encoded.codes.untyped_storage().nbytes())
        errors.append(float((out - x).norm() / x.norm()))
    assert [s * 8 / x.numel() for s in sizes] == [8, 4, 3, 2]
    assert errors == sorted(errors) and errors[-1] < 0.6


def test_a_group_must_hold_something() -> None:
    with pytest.raises(CodecError, match="group_size"):
        encode(noise(4, 8), 8, "token", group_size=0)


@pytest.mark.parametrize("group", ["channel", "token"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_fit_has_a_smaller_mean_error_and_clamps(group: Group, symmetric: bool, bits: int) -> None:
    x = torch.randn(L, H, 64, 64, generator=torch.Generator().manual_seed(1))
    errors = []
    for fit in (0.0, 0.5, 1.0):
        out = torch.full_like(x, torch.nan)
        decode_into(encode(x, bits, group, symmetric=symmetric, fit=fit), out)
        errors.append(float((out - x).norm() / x.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < (0.85 if bits == 2 else 1.0) * errors[0]


@pytest.mark.parametrize(("group", "symmetric"), FORMS)
@pytest.mark.parametrize("name", EDGE_CASES)
@pytest.mark.parametrize("bits", [2, 4])
def test_a_fit_of_edge_cases_is_no_further_off_than_the_range(
    group: Group, symmetric: bool, name: str, bits: int
) -> None:
    x, errors = EDGE_CASES[name], []
    for fit in (0.0, 1.0):
        out = torch.full_like(x, torch.nan)
        decode_into(encode(x, bits, group, symmetric=symmetric, fit=fit), out)
        errors.append(float((out.double() - x.double()).norm()))
    rounding = float(x.double().norm()) * 2.0**-10  # scale and minimum in fp16
    assert errors[1] <= errors[0] * 1.01 + rounding


@settings(max_examples=200, deadline=None)
@given(groups, st.sampled_from([2, 3, 4, 8]), st.booleans(), st.sampled_from([0.5, 1.0]))
def test_fitted_codes_keep_the_order_and_never_wrap(
    values: list[float], bits: int, symmetric: bool, fit: float
) -> None:
    x = torch.tensor(sorted(values))[None]
    codes, scale, minimum = reference.quantize(x, bits, -1, symmetric=symmetric, fit=fit)
    assert (codes.to(torch.int16).diff() >= 0).all() and int(codes.max()) <= 2**bits - 1
    assert torch.isfinite(scale).all() and (scale > 0).all()
    assert minimum is None or torch.isfinite(minimum).all()
