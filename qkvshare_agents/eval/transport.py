"""What moving KV to another process costs, per transport, beside the hot native prefix and text replay."""

import multiprocessing
import os
import platform
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

from qkvshare_agents.errors import InvalidSetting, QKVShareError
from qkvshare_agents.eval import corpus, endurance
from qkvshare_agents.eval.handoff import first_token, fork, hand_over
from qkvshare_agents.eval.packing import bring, seal_all
from qkvshare_agents.exchange.admission import unsound_words
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv import page
from qkvshare_agents.kv.page import Precision
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.canary import Canary, canary_of, divergence, rows_of, weakness
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.key_calibration import settle
from qkvshare_agents.store.runs import Step
from qkvshare_agents.store.shared_store import SharedPageStore
from qkvshare_agents.transport.interface import Transport
from qkvshare_agents.transport.local import LocalTransport
from qkvshare_agents.transport.shm import ShmTransport
from qkvshare_agents.turns.plan import crossover_tokens
from qkvshare_agents.wire import integrity, package
from qkvshare_agents.wire.package import Package
from qkvshare_agents.wire.payload import Payload

_RAW_BYTES = 32 * 1024**2
_SHORT_TOKENS = 128  # a second size, for the part of the cost that does not grow with the tokens
_DEADLINE_MS = 30_000.0


def run(
    *,
    model: str = "smollm2-135m",
    tokens: int = 2048,
    suffix: int = 32,
    preset: str = "safe",
    rounds: int = 7,
    redis_url: str = "",
    mooncake_master: str = "",
    handoffs: int = 0,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Medians over `rounds` rounds; the reader is a second process, for `local` this one.

    Per transport: write_ms digests and signs a package of `tokens` tokens; put_ms publishes it, get_ms fetches it,
    read_ms checks it. raw_put_ms, raw_get_ms: 32 MiB of random bytes. handoff_ms: all of that, storing, import and the
    first token behind `suffix` more. put_and_get_ratio, moving_ratio: put and get alone, and with write and read, of
    hot_prefix_ms. crossover_tokens: from where on moving (fixed_ms + ms_per_token, import included) beats text replay,
    None if never. break_even_mb_per_s: a bandwidth below which it never does. replay_ms, hot_prefix_ms: the same first
    token by text replay, and behind a native cache that nobody had to move. check_ms: what a receiver's checks of words
    and canary take, without the canary's own forward.
    handoffs: also move that many small packages over shm, and see what is left.
    """
    if min(tokens, suffix, rounds) < 1 or tokens <= _SHORT_TOKENS or handoffs < 0:
        raise InvalidSetting(
            f"tokens must be more than {_SHORT_TOKENS}, suffix and rounds at least 1, handoffs 0 or more"
        )
    engine = engine or Engine.load(model)
    if engine.refusal or engine.shape is None:
        raise InvalidSetting(f"{engine.name} can't hand KV over: {engine.refusal}")
    precision = settle(page.preset(preset), engine)
    ids = corpus.tokens(engine.template.encoder, tokens + suffix)
    base = _baselines(engine, precision, ids, tokens, rounds)
    sent, short = (_package(engine, precision, ids[:count]) for count in (tokens, _SHORT_TOKENS))
    result: dict[str, Any] = {
        "model": engine.name, "preset": preset, "tokens": tokens, "suffix_tokens": suffix, "rounds": rounds,
        "digest": integrity.preferred(), **base, "transports": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        os.chmod(folder, 0o700)
        options: dict[str, dict[str, Any]] = {
            "local": {},
            "shm": {"directory": folder},
            "shm mapped": {"directory": folder, "mapped": True},
        }
        if redis_url:
            options["redis"] = {"url": redis_url}
        if mooncake_master:
            options["mooncake"] = {"master": mooncake_master}
        for name, given in options.items():
            with _pair(name, given) as (transport, fetch):
                times = _times(transport, fetch, sent, rounds)
                small = _times(transport, fetch, short, rounds, raw=False)
            moving, moving_short = (_moving_ms(t) for t in (times, small))
            slope = (moving - moving_short) / (tokens - _SHORT_TOKENS) + base["import_ms"] / tokens
            times["handoff_ms"] = moving + base["graft_ms"] + base["import_and_first_ms"]
            times["put_and_get_ratio"] = (times["put_ms"] + times["get_ms"]) / base["hot_prefix_ms"]
            times["moving_ratio"] = moving / base["hot_prefix_ms"]
            fixed = max(0.0, moving_short - slope * _SHORT_TOKENS)
            times |= {"fixed_ms": fixed, "ms_per_token": slope}
            times["crossover_tokens"] = crossover_tokens(fixed, max(0.0, slope), base["replay_ms"] / (tokens + suffix))
            result["transports"][name] = times
        replay_ms_per_token = base["replay_ms"] / (tokens + suffix)
        result["break_even_mb_per_s"] = sent.kv_bytes / tokens / 1e3 / replay_ms_per_token
        if handoffs:
            result["many"] = endurance.run(ShmTransport(folder), short, handoffs)
    result |= {
        "dtype": str(engine.model.dtype),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    return result


def show(result: dict[str, Any]) -> None:
    """Print the result of `run` as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    r = result
    title = f"{r['tokens']} tokens of {r['model']}, {r['preset']}, to another process (ms)"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, title_justify="left")
    columns = (
        "write",
        "put",
        "get",
        "read",
        "put+get\n/ hot",
        "all\n/ hot",
        "32 MiB\nput",
        "\nget",
        "\nGB/s",
        "pays\nfrom",
    )
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, t in r["transports"].items():
        times = [f"{t[key]:.1f}" for key in ("write_ms", "put_ms", "get_ms", "read_ms")]
        times += [f"{t[key]:.1%}" for key in ("put_and_get_ratio", "moving_ratio")]
        raw = [f"{t['raw_put_ms']:.1f}", f"{t['raw_get_ms']:.1f}", f"{t['gb_per_s']:.2f}"]
        table.add_row(name, *times, *raw, str(t["crossover_tokens"] or "never"))
    console = Console()
    console.print(table)
    payload = next(iter(r["transports"].values()))["payload_bytes"]
    console.print(f"package {payload / 1e6:.1f} MB, signed with {r['digest']}; pays from: tokens, import included")
    console.print(f"below {r['break_even_mb_per_s']:.1f} MB/s text is always faster on this machine")
    console.print(f"hot native prefix {r['hot_prefix_ms']:.0f} ms, text replay {r['replay_ms']:.0f} ms")
    console.print(f"checking words and canary {r['check_ms']:.2f} ms, beside the canary's own forward")
    if many := r.get("many"):
        console.print(
            f"{many['handoffs']} handoffs over shm: {many['ms_each']:.2f} ms each; left: {many['files']} files, "
            f"{many['descriptors']} descriptors, {many['resident_bytes'] / 1e6:.1f} MB"
        )


def _baselines(engine: Engine, precision: Precision, ids: Ids, tokens: int, rounds: int) -> dict[str, float]:
    assert engine.shape is not None
    head, tail = ids[:tokens], ids[tokens:]
    hot = engine.begin(None)
    engine.feed(hot, head)
    sent = _package(engine, precision, head)
    answers = replace(sent, ledger=_answers(engine, head))
    logits = torch.stack(tuple(hot.expected))
    canary = canary_of(logits)
    working = KVCache(engine.shape)
    samples: dict[str, list[float]] = {}
    for _ in range(rounds + 1):  # the first round warms up
        _timed(samples, "hot_prefix_ms", lambda: first_token(engine, fork(hot), tail))
        store = SharedPageStore(b"", 2**62)
        _timed(samples, "graft_ms", partial(store.graft, sent.ids, sent.steps))
        _timed(samples, "check_ms", partial(_check, engine, answers, canary, logits))
        _timed(samples, "import_ms", partial(bring, store, head, working))
        _timed(samples, "import_and_first_ms", partial(hand_over, engine, store, working, head, tail))
    for _ in range(2):  # seconds each
        _timed(samples, "replay_ms", lambda: first_token(engine, engine.begin(None), ids))
    return {name: statistics.median(values[1:]) for name, values in samples.items()}


def _answers(engine: Engine, ids: Ids) -> tuple[tuple[str, int, int], ...]:
    """As if members had said all of it, 64 tokens each."""
    decode = engine.template.encoder.decode
    places = ((start, min(start + 64, len(ids))) for start in range(0, len(ids), 64))
    return tuple((decode(ids[start:stop]), start, stop) for start, stop in places)


def _check(engine: Engine, sent: Package, canary: Canary, logits: torch.Tensor) -> None:
    unsound_words(engine.template.encoder, sent)
    weakness(canary, rows_of(sent.covered_tokens), logits.shape[-1])
    divergence(canary, logits)


def _package(engine: Engine, precision: Precision, ids: Ids) -> Package:
    assert engine.shape is not None
    kv = KVCache(engine.shape)
    kv.clear(len(ids))
    engine.feed(engine.begin(kv), ids)
    match = seal_all(kv, ids, precision).match(ids)
    steps = tuple(
        Step(tokens, node.key, node.sealed, page) for node, (page, tokens) in zip(match.nodes, match.runs, strict=True)
    )
    return Package(tuple(ids), steps, engine.fingerprint, engine.shape.groups)


def _times(
    transport: Transport, fetch: Callable[[str, str], dict[str, float]], sent: Package, rounds: int, raw: bool = True
) -> dict[str, Any]:
    samples: dict[str, list[float]] = {}
    secret, data, nbytes = secrets.token_hex(32), Payload([os.urandom(_RAW_BYTES)]), 0

    def once(payload: Payload, prefix: str, secret: str) -> None:
        key = secrets.token_hex(16)
        _timed(samples, f"{prefix}put_ms", lambda: transport.put(key, payload, deadline_ms=_DEADLINE_MS))
        for name, ms in fetch(key, secret).items():
            samples.setdefault(f"{prefix}{name}", []).append(ms)
        transport.delete(key, deadline_ms=_DEADLINE_MS)

    for _ in range(rounds + 1):
        payload = _timed(samples, "write_ms", lambda: sent.write(secret=secret))
        nbytes = payload.nbytes
        once(payload, "", secret)
        if raw:
            once(data, "raw_", "")
    times: dict[str, Any] = {name: statistics.median(values[1:]) for name, values in samples.items()}
    times["payload_bytes"] = nbytes
    if raw:
        times["gb_per_s"] = _RAW_BYTES / 1e6 / (times["raw_put_ms"] + times["raw_get_ms"])
    return times


def _moving_ms(times: Mapping[str, float]) -> float:
    return sum(times[name] for name in ("write_ms", "put_ms", "get_ms", "read_ms"))


@contextmanager
def _pair(name: str, options: dict[str, Any]) -> Iterator[tuple[Transport, Callable[[str, str], dict[str, float]]]]:
    """A transport, and what fetches from it: in another process, unless nothing leaves this one."""
    transport = _open(name, options)
    if name == "local":
        yield transport, lambda key, secret: _fetch(transport, key, secret)
        return
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    reader = spawn.Process(target=_serve, args=(there, name, options), daemon=True)
    reader.start()

    def fetch(key: str, secret: str) -> dict[str, float]:
        here.send((key, secret))
        if not here.poll(120):
            raise QKVShareError("the reading process does not answer")
        answer = here.recv()
        if isinstance(answer, str):
            raise QKVShareError(f"the reading process failed: {answer}")
        return answer

    try:
        yield transport, fetch
    finally:
        with suppress(OSError):
            here.send(None)
        reader.join(10)
        reader.kill()
        transport.close()


def _open(name: str, options: dict[str, Any]) -> Transport:
    if name == "local":
        return LocalTransport()
    if name == "redis":
        from qkvshare_agents.transport.redis import RedisTransport

        return RedisTransport(**options)
    if name == "mooncake":
        from qkvshare_agents.transport.mooncake import MooncakeTransport

        return MooncakeTransport(**options, accept_open_ports=True)
    return ShmTransport(**options)


def _serve(pipe: Connection, name: str, options: dict[str, Any]) -> None:
    """The reading process: fetch what it is told to, until it is told None."""
    torch.set_num_threads(1)
    try:
        transport = _open(name, options)
        while (asked := pipe.recv()) is not None:
            pipe.send(_fetch(transport, *asked))
        transport.close()
    except (QKVShareError, EOFError) as error:
        pipe.send(str(error))


def _fetch(transport: Transport, key: str, secret: str) -> dict[str, float]:
    samples: dict[str, list[float]] = {}
    payload = _timed(samples, "get_ms", lambda: transport.get(key, deadline_ms=_DEADLINE_MS))
    if secret:
        _timed(samples, "read_ms", lambda: package.read(payload, secret=secret))
    return {name: values[0] for name, values in samples.items()}


def _timed(samples: dict[str, list[float]], name: str, work: Callable[[], Any]) -> Any:
    started = time.perf_counter()
    result = work()
    samples.setdefault(name, []).append((time.perf_counter() - started) * 1000)
    return result
