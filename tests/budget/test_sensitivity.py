"""The bounds hold, whatever the error within them; the estimates are near what sealed pages do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qkvshare_agents.budget.sensitivity import NOISE, WIDTHS, Seen, Unit, half_steps, key_bound, measure, value_bound
from qkvshare_agents.kv import codec
from qkvshare_kernels import reference


def seen(seed: int = 0, *, heads=2, shared=2, rows=3, tokens=128, dim=16, sharp=1.0, window: int | None = None) -> Seen:
    draw = torch.Generator().manual_seed(seed)
    positions = tokens - 1 - torch.arange(rows) * 5
    places = torch.arange(tokens)
    visible = places <= positions[:, None]
    if window:
        visible &= places > positions[:, None] - window
    query = torch.randn(heads * shared, rows, dim, generator=draw) * sharp
    keys, values = (torch.randn(heads, tokens, dim, generator=draw) for _ in "kv")
    return Seen(query, keys + torch.randn(heads, 1, dim, generator=draw), values, visible, positions, dim**-0.5)


def output(s: Seen, keys: Tensor | None = None, values: Tensor | None = None) -> Tensor:
    """Attention [HQ, N, D], written out head by head."""
    keys, values = s.keys if keys is None else keys, s.values if values is None else values
    shared = len(s.query) // len(keys)
    heads = []
    for index, query in enumerate(s.query):
        scores = query @ keys[index // shared].T * s.scaling
        heads.append(scores.masked_fill(~s.visible, -torch.inf).softmax(-1) @ values[index // shared])
    return torch.stack(heads)


def moved(s: Seen, keys: Tensor | None = None, values: Tensor | None = None) -> Tensor:
    return (output(s, keys, values) - output(s)).norm(dim=-1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 3), st.floats(0.1, 4), st.sampled_from([None, 20]), st.booleans())
def test_bounds_hold_for_any_error_within_them(seed, size, sharp, window, worst) -> None:
    s = seen(seed, sharp=sharp, window=window)
    draw = torch.Generator().manual_seed(seed + 1)
    most = torch.rand(s.keys.shape, generator=draw) * size
    error = (
        torch.randn(s.keys.shape, generator=draw).sign() * most
        if worst
        else most * (2 * torch.rand(s.keys.shape, generator=draw) - 1)
    )
    assert bool((moved(s, keys=s.keys + error) <= key_bound(s, most) * (1 + 1e-4) + 1e-5).all())
    assert bool((moved(s, values=s.values + error) <= value_bound(s, most.norm(dim=-1)) * (1 + 1e-4) + 1e-5).all())


def test_the_key_bound_is_attained_up_to_a_factor_by_the_worst_error() -> None:
    """Errors that all push the score as far as they can, each in the sign that moves the output along one direction."""
    s = seen(3, heads=1, shared=1, rows=1)
    most = torch.full_like(s.keys, 0.05)
    a = s.weights()[0, 0]
    apart = s.values[0] - a @ s.values[0]
    best = 0.0
    for direction in torch.linalg.svd(apart, full_matrices=False).Vh[:8]:
        sign = (apart @ direction).sign()[:, None] * s.query[0].sign()
        best = max(best, float(moved(s, keys=s.keys + sign * most)))
    bound = float(key_bound(s, most))
    assert best <= bound
    assert bound < 10 * best  # it lets every token push its own way: in 16 dimensions they can't all add up


def test_exact_tokens_make_the_key_bound_smaller() -> None:
    s = seen(4)
    most = torch.full_like(s.keys, 0.05)
    sinks = most.clone()
    sinks[:, :64] = 0
    assert bool((key_bound(s, sinks) < key_bound(s, most)).all())
    assert float(key_bound(s, torch.zeros_like(most)).max()) < 1e-5


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_half_steps_bound_plain_rounding(bits: int) -> None:
    x = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(bits)) * 3
    for group, dim, size, symmetric in (("channel", -2, None, False), ("token", -1, 16, True)):
        encoded = codec.encode(x, bits, group, group_size=size, symmetric=symmetric)
        out = torch.empty_like(x)
        codec.decode_into(encoded, out)
        most = half_steps(x, bits, dim, size, symmetric=symmetric)
        assert bool(((out - x).abs() <= most * (1 + 2e-3) + 8 * 2**-11).all())  # fp16 scale and minimum on top
        assert float(((out - x).abs() / most).max()) > 0.9  # and it is no larger than need be


def test_noise_is_what_the_codec_leaves() -> None:
    x = torch.randn(500, 64, 64, generator=torch.Generator().manual_seed(0))
    rotated = x @ reference.hadamard(64, x.device)
    reach = (rotated.amax(1) - rotated.amin(1)).square().mean()
    for bits, key_noise, value_noise in zip(WIDTHS, NOISE["keys"], NOISE["values"], strict=True):
        out = torch.empty_like(x)
        fit = bits < 8
        codec.decode_into(codec.encode(x, bits, "channel", rotate=True, fit=0.5 * fit), out)
        assert float((out - x).square().mean() / reach) == pytest.approx(key_noise, rel=0.05)
        codec.decode_into(codec.encode(x, bits, "token", symmetric=True, rotate=fit, fit=1.0 * fit), out)
        assert float((out - x).square().sum() / x.square().sum()) == pytest.approx(value_noise, rel=0.05)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("window", [None, 100])
def test_estimates_are_near_what_independent_errors_do(rotate: bool, window: int | None) -> None:
    """Also for shared keys and windows: the mean over many draws of the codec's noise, within a factor of 1.5."""
    s = seen(7, rows=4, tokens=256, dim=32, window=window)
    sinks, page = 4, 64
    unit = Unit(*measure(s, 256, rotate_keys=rotate, sinks=sinks, page_size=page).tolist())
    places = torch.arange(256)
    for bits in (2, 3, 4):
        errors = {"keys": [], "values": []}
        for seed in range(24):
            draw = torch.Generator().manual_seed(seed)
            turn = torch.linalg.qr(torch.randn(32, 32, generator=draw))[0]  # other errors, of the same statistics
            for row in range(4):
                packed = (places >= sinks) & (places <= s.positions[row] - page)
                one = Seen(
                    s.query[:, row : row + 1], s.keys, s.values, s.visible[row : row + 1], s.positions[row], s.scaling
                )
                keys, values = s.keys.clone(), s.values.clone()
                out = torch.empty_like(keys)
                codec.decode_into(codec.encode(s.keys, bits, "channel", group_size=page, rotate=rotate, fit=0.5), out)
                noise = (out - s.keys).std()
                keys += torch.randn(keys.shape, generator=draw) * noise * packed[:, None]
                codec.decode_into(codec.encode(s.values @ turn, bits, "token", symmetric=True, fit=1.0), out)
                values = torch.where(packed[:, None], out @ turn.T, values)
                errors["keys"].append(moved(one, keys=keys).square().mean())
                errors["values"].append(moved(one, values=values).square().mean())
        for kind, found in errors.items():
            estimate = unit.errors(kind)[WIDTHS.index(bits)]
            real = float(torch.stack(found).mean())
            assert real / 1.5 < estimate < real * 1.5, (kind, bits, estimate, real)


def test_errors_fall_with_the_width_and_running_means_stay_between() -> None:
    unit, other = Unit(3.0, 5.0, 2.0), Unit(1.0, 1.0, 4.0)
    for kind in ("keys", "values"):
        assert list(unit.errors(kind)) == sorted(unit.errors(kind), reverse=True)
    assert unit.moved(other, 0.25) == Unit(2.5, 4.0, 2.5)
    assert unit.moved(other, 1.0) == other


def test_costs_keep_ratios_of_widths_and_narrow_those_of_layers() -> None:
    for kind in ("keys", "values"):
        low, high = Unit(1e-3, 0.0, 2e-3), Unit(1.0, 0.0, 2.0)
        for unit in (low, high):
            errors, costs = unit.errors(kind), unit.costs(kind)
            assert [c / costs[0] for c in costs[:3]] == pytest.approx([e / errors[0] for e in errors[:3]])
            won = (costs[2] - costs[3]) / costs[0]
            assert 0 < won < (errors[2] - errors[3]) / errors[0] / 2, "8 bits are taken for a clear gain only"
        apart = high.costs(kind)[0] / low.costs(kind)[0]
        assert 1 < apart < high.errors(kind)[0] / low.errors(kind)[0] == pytest.approx(1000)
        assert Unit().costs(kind) == (0.0,) * 4


def test_what_stays_native_is_not_counted() -> None:
    s = seen(9, tokens=68, rows=1)  # 4 sinks, then 64 that lie in the open page
    assert measure(s, 68, rotate_keys=False, sinks=4, page_size=64).abs().max() < 1e-9
    more = measure(seen(9, tokens=200, rows=1), 200, rotate_keys=False, sinks=4, page_size=64)
    assert float(more.min()) > 0
    gain = torch.tensor([2.0] * 4)
    weighed = measure(seen(9, tokens=200, rows=1), 200, rotate_keys=False, sinks=4, page_size=64, gain=gain)
    assert torch.allclose(weighed, 2 * more)
