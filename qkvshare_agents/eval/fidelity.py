"""What a way of storing KV does to the next-token distribution, and how many bytes and milliseconds it takes.

Two measurements behind the same stored cache: *continuing* real text, and *repeating* the stored text itself
after a cue, which looks every token up and separates schemes far better.
"""

import datetime
import gc
import importlib.metadata
import math
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qkvshare_agents.engine import Engine
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import corpus, schemes
from qkvshare_agents.eval.corpus import Sample
from qkvshare_agents.eval.packing import kl_divergences
from qkvshare_agents.eval.schemes import Scheme
from qkvshare_agents.kv_cache import KVCache, KVShape
from qkvshare_agents.page import Precision
from qkvshare_agents.template import Ids

CUE = "\n\nRepeat the text above:\n"
MEASURES = (
    "stored_bytes", "bits_per_value", "packed_bits_per_value", "mean_kl", "p99_kl", "top1", "ppl_delta",
    "repeat_mean_kl", "repeat_top1", "seal_ms", "open_ms",
)  # fmt: skip
_PACKAGES = ("torch", "transformers", "optimum-quanto", "hqq")


@dataclass(frozen=True)
class Plan:
    """tokens: cached per sample. samples: in turn prose, code and chat. positions, repeat_positions: of each sample."""

    tokens: int = 2048
    samples: int = 6
    positions: int = 704
    repeat_positions: int = 192

    def __post_init__(self) -> None:
        if self.tokens < 16 or self.samples < 2 or self.positions < 1 or not 1 <= self.repeat_positions < self.tokens:
            raise InvalidSetting(
                f"need tokens >= 16, samples >= 2, positions >= 1 and repeat_positions below tokens, not {self}"
            )


FULL = Plan()
# REDUCED answers within two minutes on two cores
REDUCED = Plan(tokens=512, samples=3, positions=64, repeat_positions=64)


@dataclass(frozen=True)
class _Block:
    """Ids fed behind the cache at once, and the `targets` that the last positions should have predicted."""

    fed: Ids
    targets: Ids


@dataclass
class _Score:
    """Per position, over all samples: KL to native in nats, equal argmax, the target's log probability lost."""

    kl: list[float] = field(default_factory=list)
    agrees: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)

    def add(self, logits: Tensor, reference: Tensor, targets: Ids) -> None:
        """logits, reference (native): [N, V]; targets: N ids."""
        wanted = torch.tensor(targets, device=logits.device)
        self.kl += kl_divergences(reference, logits).tolist()  # small tensors would pin the heap around large ones
        self.agrees += (logits.argmax(-1) == reference.argmax(-1)).tolist()
        losses = [torch.nn.functional.cross_entropy(x, wanted, reduction="none").double() for x in (logits, reference)]
        self.lost += (losses[0] - losses[1]).tolist()


@dataclass
class _Tally:
    """What was seen of one scheme."""

    score: _Score = field(default_factory=_Score)
    repeat: _Score = field(default_factory=_Score)
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
    repeat_mean_kl, repeat_top1 over forced repetition of the cached text. `skipped` is the reason why a
    competitor could not run, and everything else of its row is None.
    """
    engine = engine or Engine.load(model)
    shape = _check(engine, plan)
    samples = corpus.samples(engine.template, plan.tokens + plan.positions + 1, plan.samples)
    tried = schemes.all_schemes(engine.config, extra)
    tallies = {scheme.name: _Tally() for scheme in tried}
    working, other = KVCache(shape), _prefill(engine, shape, samples[-1], plan)
    for sample in samples:
        source = _prefill(engine, shape, sample, plan)
        blocks = _blocks(engine, sample, plan)
        references = [_logits(engine, source, block) for block in blocks]
        for scheme in tried:
            kv, tally = other if scheme.of_other_text else source, tallies[scheme.name]
            if _store(scheme, kv, working, tally):
                for score, block, reference in zip((tally.score, tally.repeat), blocks, references, strict=True):
                    score.add(_logits(engine, working, block), reference, block.targets)
        other = source
        gc.collect()  # a store's nodes point at each other: its pages would stay for many samples
    values = plan.tokens * shape.layers * shape.heads * (shape.key_dim + shape.value_dim)
    return {"header": _header(engine, plan, shape), "rows": [_row(s, tallies[s.name], values) for s in tried]}


def _check(engine: Engine, plan: Plan) -> KVShape:
    if engine.refusal or engine.shape is None:
        raise InvalidSetting(f"{engine.name} can't hand KV over: {engine.refusal}")
    limit = min(engine.context_tokens, engine.kv_limit_tokens or engine.context_tokens)
    # The cue is short, but its ids are the tokenizer's: 32 is more than any needs
    longest = plan.tokens + max(plan.positions, plan.repeat_positions + 32)
    if longest > limit:
        raise InvalidSetting(f"{longest} tokens are needed, {engine.name} takes {limit}; use fewer tokens")
    return engine.shape


def _prefill(engine: Engine, shape: KVShape, sample: Sample, plan: Plan) -> KVCache:
    kv = KVCache(shape)
    kv.clear(plan.tokens + plan.positions)
    engine.feed(engine.begin(kv), sample.ids[: plan.tokens])
    return kv


def _blocks(engine: Engine, sample: Sample, plan: Plan) -> tuple[_Block, _Block]:
    """Continuation of the sample's text, and repetition of its beginning."""
    rest = sample.ids[plan.tokens :]
    text = sample.ids[sample.opening_tokens : plan.tokens][: plan.repeat_positions]
    return _Block(rest[:-1], rest[1:]), _Block(engine.template.encoder.text(CUE) + text[:-1], text)


def _logits(engine: Engine, kv: KVCache, block: _Block) -> Tensor:
    """Logits [N, V] of the block's N last positions behind `kv`, which is left as it was."""
    start, count = kv.tokens, len(block.targets)
    run, device = engine.begin(kv), engine.model.device
    output = engine.model(
        input_ids=torch.tensor([block.fed], device=device),
        position_ids=torch.arange(start, start + len(block.fed), device=device)[None],
        use_cache=True,
        **{engine._cache_argument: run.cache, **({"logits_to_keep": count} if engine._keeps_logits else {})},
    )
    kv.crop(start)
    return output.logits[0, -count:].float()


def _store(scheme: Scheme, kv: KVCache, working: KVCache, tally: _Tally) -> bool:
    """Seal `kv` and open it into `working`, timed and weighed. False if the scheme can't."""
    if tally.skipped:
        return False
    try:
        start = time.perf_counter()
        stored = scheme.seal(kv)
        sealed = time.perf_counter()
        stored.open_into(working)
        opened = time.perf_counter()
    except Exception as error:
        if not scheme.optional:
            raise
        tally.skipped = " ".join(f"{type(error).__name__}: {error}".split())
        return False
    tally.seal_ms.append((sealed - start) * 1e3)
    tally.open_ms.append((opened - sealed) * 1e3)
    weighed = schemes.storage_bytes(stored.tensors), schemes.storage_bytes(stored.packed), stored.packed_values
    tally.weights.append(weighed)
    return True


def _row(scheme: Scheme, tally: _Tally, values: int) -> dict[str, Any]:
    row: dict[str, Any] = {"scheme": scheme.name, "group": scheme.group, **dict.fromkeys(MEASURES)}
    if tally.skipped:
        return {**row, "skipped": tally.skipped}
    stored, packed, packed_values = (statistics.fmean(column) for column in zip(*tally.weights, strict=True))
    score, repeat = tally.score, tally.repeat
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
        "seal_ms": statistics.median(tally.seal_ms),
        "open_ms": statistics.median(tally.open_ms),
    }


def _header(engine: Engine, plan: Plan, shape: KVShape) -> dict[str, Any]:
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
        "tokens": plan.tokens,
        "samples": plan.samples,
        "positions": plan.samples * plan.positions,
        "repeat_positions": plan.samples * plan.repeat_positions,
        "fp16_bytes": shape.fp16_bytes(plan.tokens),
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }
