"""A turn that reads its history packed says what one with a native copy says, and holds less."""

import pytest
import torch
from support import tiny_engine

from qkvshare_agents.budget import observer
from qkvshare_agents.host.host import Host
from qkvshare_agents.kv.lean_cache import LeanCache
from qkvshare_agents.kv.page import PRESETS, Precision, keep_native, seal
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import packed_attention
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.request import Turn

IDS = [(7 * i + i // 11) % 600 for i in range(400)]
PRECISION = PRESETS["compact"]


def tiny(kind: str):
    return tiny_engine(kind, **({"sliding_window": 150} if kind == "gemma3_text" else {}))


def filled(engine, precision=PRECISION, tokens: int = 300) -> tuple[KVCache, list]:
    """Native KV of `tokens` tokens, and pages of it: full ones sealed, the rest open."""
    kv = KVCache(engine.shape)
    engine.feed(engine.begin(kv), IDS[:tokens])
    runs = []
    for start in range(0, tokens, 64):
        stop = min(start + 64, tokens)
        span = kv.span(start, stop)
        page = seal(span, precision, starts_sequence=start == 0) if stop - start == 64 else keep_native(span)
        runs.append((page, stop - start))
    return kv, runs


def both(engine, runs) -> tuple[KVCache, LeanCache]:
    native, lean = KVCache(engine.shape), LeanCache(engine.shape)
    for kv in (native, lean):
        kv.clear(0)
        kv.load(runs)
    return native, lean


def same(a, b) -> bool:
    return all(
        torch.equal(x, y)
        for (_, *ours), (_, *theirs) in zip(a.layers(), b.layers(), strict=True)
        for x, y in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_it_holds_what_a_native_cache_holds(kind: str) -> None:
    engine = tiny(kind)
    _, runs = filled(engine)
    native, lean = both(engine, runs)
    a, b = engine.feed(engine.begin(native), IDS[300:340]), engine.feed(engine.begin(lean), IDS[300:340])
    assert torch.allclose(a, b, atol=1e-5)
    assert native.tokens == lean.tokens == 340
    for start, stop in ((0, 64), (256, 320), (250, 262), (300, 340), (310, 311), (0, 340)):
        ours, theirs = lean.span(start, stop), native.span(start, stop)
        assert all(
            torch.allclose(x, y, atol=1e-5)
            for (_, *p), (_, *q) in zip(ours.layers(), theirs.layers(), strict=True)
            for x, y in zip(p, q, strict=True)
        )
    assert lean.nbytes < native.nbytes


@pytest.mark.parametrize("tokens", [400, 320, 300, 290, 256, 130, 1, 0])
def test_crop(tokens: int) -> None:
    engine = tiny_engine()
    _, runs = filled(engine)
    native, lean = both(engine, runs)
    for kv in (native, lean):
        engine.feed(engine.begin(kv), IDS[300:340])
        kv.crop(tokens)
    assert native.tokens == lean.tokens == min(tokens, 340)
    if 0 < tokens <= 300:
        assert same(lean.span(0, tokens), native.span(0, tokens))


def talk(host: Host, rounds: int = 5) -> list[str]:
    messages = [Message("user", "Say something long enough to fill a page or two of the cache. " * 12, "user")]
    said = []
    for i in range(rounds):
        name = "ab"[i % 2]
        turn = Turn(host.roster.learn("", name, f"You are {name}."), "", tuple(messages), Sampling(max_tokens=20))
        said.append(host.submit(turn).result().text)
        messages += [Message("user", said[-1], name), Message("user", "Go on. " * 20, "user")]
    return said


@pytest.mark.parametrize("kind", ["llama", "qwen2", "bloom"])
@pytest.mark.parametrize("precision", ["native", "compact"])
def test_a_host_says_the_same_with_a_packed_history(kind: str, precision: str) -> None:
    """bloom attends by itself: its layers become native one after the other."""
    hosts = [Host(HostSettings("tiny", precision=precision, packed_history=h), tiny(kind)) for h in (False, True)]
    said = [talk(host) for host in hosts]
    assert said[0] == said[1]
    for ours, theirs in zip(*(host.reports for host in hosts), strict=True):
        assert (ours.mode, ours.reused_tokens, ours.payload_bytes) == (
            theirs.mode,
            theirs.reused_tokens,
            theirs.payload_bytes,
        )
    assert list(hosts[1].reports)[-1].reused_tokens > 300
    kv = hosts[1]._load().runner._working._kv
    assert isinstance(kv, LeanCache) and kv.nbytes < hosts[0]._load().runner._working._kv.nbytes


def test_models_with_windows_keep_their_working_cache() -> None:
    """Their pages hold no more than what is looked back at."""
    hosts = [
        Host(HostSettings("tiny", precision="native", packed_history=h), tiny("gemma3_text")) for h in (False, True)
    ]
    assert talk(hosts[0]) == talk(hosts[1])
    assert type(hosts[1]._load().runner._working._kv) is KVCache


def test_recurrent_models_keep_their_working_cache() -> None:
    from support import tiny_tokenizer

    from qkvshare_agents.eval.families import tiny_model
    from qkvshare_agents.model.engine import Engine

    for family in ("mamba2", "qwen3_5_text"):
        engine = Engine.of(tiny_model(family), tiny_tokenizer())
        said = [
            talk(Host(HostSettings("tiny", precision="native", packed_history=h), engine), 3) for h in (False, True)
        ]
        assert said[0] == said[1], family


def test_attention_over_packed_pages_is_observed_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer, "TOKENS_BETWEEN", 1)
    seen = []
    for packed in (False, True):
        engine = tiny_engine()
        _, runs = filled(engine, tokens=256)
        native, lean = both(engine, runs)
        engine.observer = observer.Observer(engine.model, 3, Precision(rotate_keys=False))
        run = packed_attention.begin(engine, lean.packed) if packed else engine.begin(native)
        run.kv = lean if packed else native
        engine.feed(run, IDS[256:])
        seen.append(engine.observer.take())
        assert engine.observer.refusal is None
    for ours, theirs in zip(*seen, strict=True):
        assert ours.keys == pytest.approx(theirs.keys, rel=1e-3)
        assert ours.values == pytest.approx(theirs.values, rel=1e-3)


def test_joint_precision_works_on_a_packed_history() -> None:
    engine = tiny_engine(hidden_size=64)
    host = Host(HostSettings("tiny", precision="joint", average_bits=3, packed_history=True), engine)
    talk(host)
    rows = host.status()["agents"]
    assert {row["agent"] for row in rows} == {"a", "b"} and sum(row["observations"] for row in rows) >= 1
    assert list(host.reports)[-1].reused_tokens > 300
