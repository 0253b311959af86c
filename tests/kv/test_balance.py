"""Balanced keys: the same scores from fewer errors, at no byte, in the cache, on packed pages and in packages."""

import json
from dataclasses import replace

import pytest
import torch
from packages import BALANCE, PRECISIONS, SECRET, flat, package, pages
from support import tiny_engine

from qkvshare_agents.errors import PackageError
from qkvshare_agents.kv.balance import Balance, balance_of, of_sizes
from qkvshare_agents.kv.packed_cache import PackedCache
from qkvshare_agents.kv.page import Page, Precision, crop, seal
from qkvshare_agents.kv.span import Block, Span
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import key_calibration
from qkvshare_agents.wire import container
from qkvshare_agents.wire.package import inspect, read
from qkvshare_agents.wire.payload import Payload

CPU = torch.device("cpu")


def lopsided(tokens: int = 64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [2 layers, 1 head, tokens, 32]; what is large in the ones is small in the others."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.linspace(-2, 2, 32))
    queries, keys = (torch.randn(2, 1, tokens, 32, generator=generator) for _ in range(2))
    return queries * sizes, keys / sizes


def balance_for(queries: torch.Tensor, keys: torch.Tensor) -> Balance:
    return of_sizes(*(list(x.square().mean(-2).sqrt()) for x in (queries, keys)))


def opened(page: Page, like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = Span(
        page.tokens, (Block((0, 1), torch.empty(like.shape, dtype=dtype), torch.empty(like.shape, dtype=dtype)),)
    )
    page.open_into(out)
    return out.blocks[0].keys


def sealed(keys: torch.Tensor, precision: Precision) -> Page:
    return seal(Span(keys.shape[-2], (Block((0, 1), keys, keys),)), precision, starts_sequence=True)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_off_by_less_at_the_same_bytes(bits: int, dtype: torch.dtype) -> None:
    queries, keys = lopsided()
    balance = balance_for(queries, keys)
    plain = sealed(keys.to(dtype), Precision(bits, bits, rotate_keys=True))
    balanced = sealed(keys.to(dtype), Precision(bits, bits, rotate_keys=True, balance=balance))
    off = [
        float((queries @ (opened(page, keys, dtype).float() - keys).mT).square().mean()) for page in (plain, balanced)
    ]
    rounding = float((queries @ (keys.to(dtype).float() - keys).mT).square().mean())
    assert off[1] - rounding < 0.5 * (off[0] - rounding) or (bits == 8 and off[1] < 2 * rounding + 1e-12)
    assert balanced.nbytes == plain.nbytes
    sinks = slice(0, 4)
    assert torch.equal(opened(balanced, keys, dtype)[..., sinks, :], keys.to(dtype)[..., sinks, :])


def test_the_best_factors_are_of_the_geometric_mean() -> None:
    queries, keys = lopsided(4096)
    factors = balance_for(queries, keys).factors((0, 1), 1, CPU)
    wanted = torch.exp2(torch.linspace(-2, 2, 32))
    assert (factors / wanted).log2().abs().max() < 0.2
    assert factors is balance_for(queries, keys).factors((0, 1), 1, CPU), "one tensor for all pages"


def test_sizes_that_say_nothing_are_harmless() -> None:
    ones = torch.ones(1, 8)
    huge = torch.tensor([[0.0, 1e-30, 1.0, 1e30, 5.0, 0.0, 2.0, 1.0]])
    for queries, keys in ((ones, huge), (huge, ones), (torch.zeros(1, 8), torch.zeros(1, 8))):
        factors = of_sizes([queries], [keys]).factors((0,), 1, CPU)
        assert factors.isfinite().all() and factors.min() >= 1 / 32 and factors.max() <= 32


def test_keys_that_are_not_rotated_are_not_balanced() -> None:
    _, keys = lopsided()
    page = sealed(keys, Precision(4, 4, rotate_keys=False, balance=Balance((bytes([140] * 32),) * 2)))
    assert page.keys[0].balance is None


@pytest.mark.parametrize("precision", PRECISIONS[-2:])
@pytest.mark.parametrize("tokens", [3, 16])
def test_packages_carry_it(precision: Precision, tokens: int) -> None:
    made = pages(precision)
    made = [crop(made[0], tokens)] if tokens < 16 else made
    got = read(Payload([flat(package(made, ledger=()).write(secret=SECRET))]), secret=SECRET)
    for page, step in zip(made, got.steps, strict=True):
        assert [part.balance for part in step.page.keys] == [p.balance if p.packed else None for p in page.keys]
        assert not any(part.balance for part in step.page.values)
    if tokens == 16:
        assert any(part.balance for step in got.steps for part in step.page.keys)


@pytest.mark.parametrize(
    ("edit", "wrong"),
    [
        (lambda m: m.update(balances=[]), "left out where there are none"),
        (lambda m: m.update(balances=m["balances"] * 2), "no two are equal"),
        (lambda m: m.update(balances=["00" + m["balances"][0][2:]]), "88 to 168"),
        (lambda m: m.update(balances=[m["balances"][0][2:]]), "hex digits"),
        (lambda m: m.update(balances="ff"), "must be a list"),
        (lambda m: m.update(balances=[7]), "hex digits"),
        (lambda m: m.pop("balances"), "part.balance is 0"),
        (lambda m: m["layouts"][0]["keys"][0].update(balance=1), "part.balance is 1"),
        (lambda m: m["layouts"][0]["keys"][0].update(balance=True), "part.balance"),
        (lambda m: m["layouts"][0]["keys"][0].update(balance=None), "part.balance"),
        (lambda m: m["layouts"][0]["values"][0].update(balance=0), "only keys that are packed and rotated"),
        (lambda m: m["layouts"][0]["keys"][0]["plane"].update(rotated=False), "only keys that are packed and rotated"),
    ],
)
def test_a_balance_that_can_not_be_is_refused(edit, wrong: str) -> None:
    data = flat(package(pages(PRECISIONS[-2])).write(secret=SECRET))
    contents, _ = inspect(Payload([data]))
    manifest = json.loads(contents.metadata["manifest"])
    edit(manifest)
    head = container.write_head(contents.entries, {**contents.metadata, "manifest": json.dumps(manifest)})
    with pytest.raises(PackageError, match=wrong):
        inspect(Payload([head, data[len(contents.head) :]]))


def test_a_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        balance_of(bytes([128] * 15), [8, 8])
    assert balance_of(b"".join(BALANCE.steps), [8] * 4) == BALANCE


@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "with other factors on one page"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_packed_pages_knows_the_factors(mixed: bool, dtype: torch.dtype) -> None:
    engine = tiny_engine()
    found = key_calibration.balance_of(engine)
    assert engine.shape and found
    shape = replace(engine.shape, dtype=dtype)
    native, packed = KVCache(shape), PackedCache(shape)
    other = Balance(tuple(bytes([140 - i % 20 for i in range(len(row))]) for row in found.steps))
    generator = torch.Generator().manual_seed(3)
    runs = []
    for start in (0, 64):
        span = engine_noise(shape, generator, dtype)
        precision = Precision(4, 4, rotate_keys=True, balance=other if mixed and start else found)
        runs.append((seal(span, precision, starts_sequence=start == 0), 64))
    native.clear(160)
    native.load(runs)
    packed.load(runs)
    for layer in range(shape.layers):
        keys, values = native.layer(layer)
        new = [torch.randn(x.shape[0], 5, x.shape[2], generator=generator).to(dtype) for x in (keys, values)]
        packed.append(layer, *new)
        keys, values = (torch.cat([x, y], 1).float() for x, y in zip((keys, values), new, strict=True))
        query = torch.randn(keys.shape[0] * 2, keys.shape[-1], generator=generator).to(dtype)
        got = packed.attend(layer, query, 0.25)
        scores = (query.float().unflatten(0, (len(keys), -1)) * 0.25) @ keys.mT
        expected = (scores.softmax(-1) @ values).flatten(0, 1)
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        assert got.dtype == dtype and (got - expected).norm() < limit * expected.norm()


def engine_noise(shape, generator: torch.Generator, dtype: torch.dtype) -> Span:
    def noise(group, dim: int) -> torch.Tensor:
        return torch.randn(len(group.layers), group.heads, 64, dim, generator=generator).to(dtype)

    return Span(64, tuple(Block(g.layers, noise(g, g.key_dim), noise(g, g.value_dim)) for g in shape.groups))
