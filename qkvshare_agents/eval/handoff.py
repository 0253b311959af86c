"""What one handoff costs beside text replay and the hot native prefix cache, in one process."""

import copy
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import corpus
from qkvshare_agents.eval.packing import bring, kl_divergence, seal_all
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv import page
from qkvshare_agents.kv.page import Precision
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.key_calibration import settle
from qkvshare_agents.model.run import Run
from qkvshare_agents.store.page_store import PageStore

GREEDY_TOKENS = 64


def run(
    *,
    model: str = "smollm2-135m",
    dtype: str = "auto",
    tokens: int = 2048,
    suffix: int = 32,
    preset: str = "safe",
    rounds: int = 5,
    prompts: int = 40,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Medians over `rounds` interleaved rounds, and fidelity over `prompts` prompts (0: not measured).

    replay_ms: text replay of all tokens. hot_prefix_ms: the suffix behind transformers' own cache, the limit.
    hot_in_place_ms: the suffix behind our native working cache, nothing imported. import_ms: pages into the
    working cache. handoff_ms: lookup, import and suffix. seal_ms: encoding all tokens. mean_kl: KL(replay ||
    handoff) of the next token. greedy_equal_fraction: prompts whose 64 greedy tokens are all the same.
    """
    if tokens < 1 or suffix < 1 or rounds < 1 or prompts < 0:
        raise InvalidSetting("tokens, suffix and rounds must be at least 1, prompts at least 0")
    engine = engine or Engine.load(model, dtype=dtype)
    if engine.refusal or engine.shape is None:
        raise InvalidSetting(f"{engine.name} can't hand KV over: {engine.refusal}")
    if engine.has_state:
        raise InvalidSetting(
            f"{engine.name} has recurrent layers; this benchmark is for attention, see bench conversation"
        )
    precision = settle(page.preset(preset), engine)
    tasks = corpus.tasks(prompts)
    ids = corpus.tokens(engine.template.encoder, tokens + suffix)
    times = _times(engine, precision, ids, tokens, rounds)
    fidelity = _fidelity(engine, precision, tasks) if tasks else {}
    return {
        "model": engine.name,
        "preset": preset,
        "tokens": tokens,
        "suffix_tokens": suffix,
        **times,
        **fidelity,
        "dtype": str(engine.model.dtype),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "prompts": prompts,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def show(result: dict[str, Any]) -> None:
    """Print the result of `run` as a table with the ratios that matter."""
    from rich.console import Console
    from rich.table import Table

    r = result
    table = Table(title=f"Handoff of {r['tokens']} tokens, suffix of {r['suffix_tokens']}: {r['model']}, {r['preset']}")
    for column in ("", "ms", "replay / this", "this / hot prefix"):
        table.add_column(column, justify="left" if not column else "right")
    rows = {
        "text replay": "replay_ms",
        "hot native prefix (transformers' cache)": "hot_prefix_ms",
        "hot native prefix (in place)": "hot_in_place_ms",
        "handoff: import + suffix": "handoff_ms",
        "  of which import": "import_ms",
        "seal all tokens": "seal_ms",
    }
    for label, key in rows.items():
        table.add_row(label, f"{r[key]:.1f}", f"{r['replay_ms'] / r[key]:.1f}", f"{r[key] / r['hot_prefix_ms']:.2f}")
    console = Console()
    console.print(table)
    ratio = r["payload_bytes"] / r["native_fp16_bytes"]
    console.print(
        f"payload {r['payload_bytes'] / 1e6:.1f} MB, {ratio:.3f} of fp16 ({r['native_fp16_bytes'] / 1e6:.1f} MB)"
    )
    with_seal = (r["handoff_ms"] + r["seal_ms"]) / r["hot_prefix_ms"]
    console.print(f"handoff with sealing / hot prefix: {with_seal:.2f}")
    if "mean_kl" in r:
        console.print(
            f"over {r['prompts']} prompts: mean KL {r['mean_kl']:.1e}, "
            f"{GREEDY_TOKENS} greedy tokens equal in {r['greedy_equal_fraction']:.1%}"
        )


def _times(engine: Engine, precision: Precision, ids: Ids, tokens: int, rounds: int) -> dict[str, Any]:
    assert engine.shape is not None
    head, tail = ids[:tokens], ids[tokens:]
    kv = KVCache(engine.shape)
    kv.clear(len(ids))
    engine.feed(engine.begin(kv), head)
    hot = engine.begin(None)
    engine.feed(hot, head)
    samples: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[..., Any]) -> Any:
        started = time.perf_counter()
        result = work()
        samples.setdefault(name, []).append((time.perf_counter() - started) * 1000)
        return result

    working = KVCache(engine.shape)
    for _ in range(rounds + 1):  # the first round warms up
        timed("replay_ms", lambda: first_token(engine, engine.begin(None), ids))
        timed("hot_prefix_ms", lambda: first_token(engine, fork(hot), tail))
        timed("hot_in_place_ms", lambda: first_token(engine, engine.begin(kv), tail))
        kv.crop(tokens)
        store = timed("seal_ms", lambda: seal_all(kv, head, precision))

        timed("import_ms", lambda store=store: bring(store, head, working))
        timed(
            "handoff_ms",
            lambda store=store: hand_over(engine, store, working, head, tail),
        )
    return {
        **{name: statistics.median(values[1:]) for name, values in samples.items()},
        "payload_bytes": store.nbytes,
        "native_fp16_bytes": engine.shape.fp16_bytes(tokens),
    }


def _fidelity(engine: Engine, precision: Precision, tasks: list[tuple[str, str]]) -> dict[str, Any]:
    """Greedy decoding after a handoff beside greedy decoding after text replay, as long as they agree."""
    assert engine.shape is not None
    divergences, equal = [], 0
    template = engine.template
    writer, reader = KVCache(engine.shape), KVCache(engine.shape)
    for text, task in tasks:
        head = template.head("") + template.encoder.text(text)
        suffix = template.encoder.text("\n\n" + task) + template.turn
        writer.clear(len(head))
        engine.feed(engine.begin(writer), head)
        store = seal_all(writer, head, precision)
        bring(store, head, reader)
        replayed, handed = engine.begin(None), engine.begin(reader)
        a, b = engine.feed(replayed, head + suffix), engine.feed(handed, suffix)
        for step in range(GREEDY_TOKENS):
            assert a is not None and b is not None
            divergences.append(kl_divergence(a, b))
            token = int(a.argmax())
            if token != int(b.argmax()):
                break
            if token in engine.stop_ids or step == GREEDY_TOKENS - 1:
                equal += 1
                break
            a, b = engine.feed(replayed, [token]), engine.feed(handed, [token])
    return {"mean_kl": statistics.fmean(divergences), "greedy_equal_fraction": equal / len(tasks)}


def hand_over(engine: Engine, store: PageStore, kv: KVCache, head: Ids, tail: Ids) -> int:
    """The likeliest token behind `head`, whose KV comes from `store` into `kv`, and `tail`, which is read."""
    bring(store, head, kv)
    return first_token(engine, engine.begin(kv), tail)


def fork(run: Run) -> Run:
    """Another run behind the same native tensors, which transformers' cache never changes in place."""
    cache: Any = copy.copy(run.cache)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    return Run(cache, None, run.tokens)


def first_token(engine: Engine, run: Run, ids: Ids) -> int:
    """The likeliest token behind `ids`, read where `run` is."""
    logits = engine.feed(run, ids)
    assert logits is not None
    return int(logits.argmax())
