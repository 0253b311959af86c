"""Agents that share one budget: how well each way to spend it keeps what they know, at equal bytes.

Every agent has a conversation of its own, whose KV is stored at the widths that a policy gives it. What is read behind
it (`team`) is compared with native KV. `uniform` and `key_value_split` are fixed widths, `per_layer` chooses per layer
for all agents alike, `joint` per agent and layer; both choose from what attention showed while the conversations were
read, and keep to the bytes that fixed widths take.
"""

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from qkvshare_agents.budget.agents import curves_of, mean_units, page_sizes, size_at
from qkvshare_agents.budget.knapsack import Item, allocate
from qkvshare_agents.budget.observer import Observer
from qkvshare_agents.budget.sensitivity import Unit
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval.cases import CUE, Block, code_blocks
from qkvshare_agents.eval.fidelity import conditions
from qkvshare_agents.eval.packing import ROOM_TOKENS, bring, kl_divergences, seal_all
from qkvshare_agents.eval.speed import DECODED, tokens_per_s
from qkvshare_agents.eval.team import Agent, agents_that_differ
from qkvshare_agents.kv.codec import prepare
from qkvshare_agents.kv.lean_cache import LeanCache
from qkvshare_agents.kv.page import PRESETS, Precision
from qkvshare_agents.kv.shape import KVShape
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.key_calibration import settle

Policy = Literal["native", "uniform", "key_value_split", "per_layer", "joint"]
AVERAGES = (2.0, 2.5, 3.0, 3.5, 4.0)
_UNIFORM = {2.0: (2, 2), 3.0: (3, 3), 4.0: (4, 4), 8.0: (8, 8)}
_NO_WIDTHS = "no fixed widths have this average"
# The same average with wider keys; no two of the widths average to 2 or 4 otherwise
_SPLIT = {2.5: (3, 2), 3.0: (4, 2), 3.5: (4, 3)}


@dataclass
class _Read:
    """An agent's native KV, what attention showed of it, what is read behind it, and the logits there."""

    agent: Agent
    kv: KVCache
    units: list[Unit]
    blocks: list[Block]
    references: list[Tensor]


@torch.inference_mode()
def run(
    *,
    model: str = "smollm2-135m",
    tokens: int = 1024,
    positions: int = 384,
    averages: Sequence[float] = AVERAGES,
    clones: int = 4,
    problems: int = 6,
    answer_tokens: int = 48,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Measure every policy at every average width: {"header", "rows"}.

    Of each row: policy; team (`different` agents, or `clones` of one); agents, their number; average_bits; stored_bytes
    of all agents (storages, everything counted); mean_kl in nats and top1, means over the agents, whose texts go on,
    are repeated, or are asked for facts or code; perplexity of the texts that go on; needle_hits, the fraction of facts
    found; equal_answers, how many of native's greedy answers to `problems` of HumanEval (at most `answer_tokens`) are
    the same to their end, and equal_prefix_tokens, the mean number of tokens up to the first other one; peak_kv_bytes
    while the agents decode in turn: all that is stored and what the running one holds besides, reading its history
    packed; opened_peak_kv_bytes with a native copy of it instead; tokens_per_s of the one with the longest history,
    read packed, and native_tokens_per_s on its native cache in turn with that. `skipped` says why there is no such row.
    """
    if any(not 2 <= average <= 8 for average in averages):
        raise InvalidSetting(f"average widths go from 2 to 8, not {list(averages)}")
    engine = engine or Engine.load(model)
    if engine.refusal or engine.shape is None or not engine.shape.layers:
        raise InvalidSetting(f"{engine.name} can't hand KV over: {engine.refusal}")
    prepare(engine.model.device)
    load = os.getloadavg()[0]
    precision = settle(Precision(), engine)
    differ = agents_that_differ(engine, tokens, positions, problems)
    team = [_read(engine, agent, precision, answer_tokens) for agent in differ]
    rows: list[dict[str, Any]] = []
    for name, reads, copies in (("different", team, 1), ("clones", team[:1], clones)):
        measured = _Measured(engine, reads * copies)
        rows.append({"team": name} | measured.native())
        for average in averages:
            for policy, plan in _plans(engine.shape, precision, reads * copies, average).items():
                row = {"team": name, "policy": policy, "agents": len(plan or reads * copies), "average_bits": average}
                rows.append(row | (measured.row(plan) if plan else {"skipped": _NO_WIDTHS}))
    fp16_bytes = {"different": sum(engine.shape.fp16_bytes(len(r.agent.ids)) for r in team)}
    fp16_bytes["clones"] = clones * engine.shape.fp16_bytes(len(team[0].agent.ids))
    answers = [len(block.targets) for read in team for block in read.blocks if block.kind == "code"]
    header = conditions(engine, engine.shape) | {
        "tokens": tokens,
        "positions": positions,
        "problems": problems,
        "answer_tokens": statistics.fmean(answers) if answers else None,
        "fp16_bytes": fp16_bytes,
        "load": [load, os.getloadavg()[0]],  # processes that wanted a core in the minute before the run, and at its end
    }
    return {"header": header, "rows": rows}


def _read(engine: Engine, agent: Agent, precision: Precision, answer_tokens: int) -> _Read:
    """Read the agent's conversation, look on, and read what comes behind it."""
    assert engine.shape
    kv = KVCache(engine.shape)
    kv.clear(len(agent.ids) + ROOM_TOKENS)
    engine.observer = Observer(engine.model, engine.shape.layers, precision)
    try:
        engine.feed(engine.begin(kv), agent.ids)
        units = engine.observer.take()
        if not units:
            raise InvalidSetting(f"{engine.name}: {engine.observer.refusal or 'fewer tokens than are observed'}")
    finally:
        engine.observer = None
    blocks = [*agent.blocks, *code_blocks(engine, kv, agent.problems, answer_tokens)]
    references = [engine.logits(kv, block.fed, len(block.targets)) for block in blocks]
    return _Read(agent, kv, units, blocks, references)


def _plans(
    shape: KVShape, precision: Precision, reads: Sequence[_Read], average: float
) -> dict[Policy, list[Precision] | None]:
    """The precision of each agent, by policy; None where fixed widths have no such average."""
    sizes = page_sizes(shape, precision)
    pages = [len(read.agent.ids) // precision.page_size for read in reads]
    room = int(sum(pages) * sum(size_at(size, average) for size in sizes))
    alike = allocate([Item(c, 1.0, sum(pages)) for c in curves_of(mean_units([r.units for r in reads]), sizes)], room)
    items = [Item(c, 1.0, n) for read, n in zip(reads, pages, strict=True) for c in curves_of(read.units, sizes)]
    apart = allocate(items, room)

    def by_layer(widths: Sequence[int]) -> Precision:
        pairs = tuple(zip(widths[::2], widths[1::2], strict=True))
        if len(set(pairs)) == 1:
            return replace(precision, key_bits=pairs[0][0], value_bits=pairs[0][1])
        return replace(precision, widths=pairs)

    def fixed(pair: tuple[int, int] | None) -> list[Precision] | None:
        return [replace(precision, key_bits=pair[0], value_bits=pair[1])] * len(reads) if pair else None

    each = len(sizes)
    return {
        "uniform": fixed(_UNIFORM.get(average)),
        "key_value_split": fixed(_SPLIT.get(average)),
        "per_layer": [by_layer(alike.widths)] * len(reads),
        "joint": [by_layer(apart.widths[i * each : (i + 1) * each]) for i in range(len(reads))],
    }


class _Measured:
    """Rows of one team; what was measured of an agent at some widths is not measured again."""

    def __init__(self, engine: Engine, reads: Sequence[_Read]) -> None:
        assert engine.shape
        self._engine, self._reads, self._shape = engine, reads, engine.shape
        self._seen: dict[tuple[str, Precision], dict[str, Any]] = {}
        self._decoded: dict[tuple[str, Precision | None], dict[str, Any]] = {}

    def native(self) -> dict[str, Any]:
        """Every agent with native KV of its own, of exactly the tokens that it will look back at."""
        whole = sum(seal_all(read.kv, read.agent.ids, PRESETS["native"]).nbytes for read in self._reads)
        speed = self._speeds(self._longest, None)["native_tokens_per_s"]
        return {
            "policy": "native",
            "agents": len(self._reads),
            "average_bits": float(torch.finfo(self._shape.dtype).bits),
            "stored_bytes": whole,
            **_mean([_outcome(read, read.references) for read in self._reads]),
            "peak_kv_bytes": whole,
            "tokens_per_s": speed,
            "opened_peak_kv_bytes": whole,
            "native_tokens_per_s": speed,
        }

    def row(self, plan: Sequence[Precision]) -> dict[str, Any]:
        """What the agents keep when each is stored as `plan` says."""
        found = [self._agent(read, precision) for read, precision in zip(self._reads, plan, strict=True)]
        stored = sum(each["stored_bytes"] for each in found)
        speeds = self._speeds(self._longest, plan[self._longest])
        row = {"stored_bytes": stored, **_mean(found), **speeds}
        return row | {name: stored + row[name] for name in ("peak_kv_bytes", "opened_peak_kv_bytes")}

    @property
    def _longest(self) -> int:
        return max(range(len(self._reads)), key=lambda i: len(self._reads[i].agent.ids))

    def _speeds(self, index: int, precision: Precision | None) -> dict[str, Any]:
        """How fast one agent decodes behind a cue, and what its working cache holds then, beside pages that stay packed
        where hosts can let them (no windows), and with a native copy of them. None: native alone."""
        read, key = self._reads[index], (self._reads[index].agent.name, precision)
        if key not in self._decoded:
            before, caches, held = read.kv.tokens, [read.kv], dict[str, int]()
            cue = self._engine.template.encoder.text(CUE)
            if precision:
                store = seal_all(read.kv, read.agent.ids, precision)
                caches.append(KVCache(self._shape))
                bring(store, read.agent.ids, caches[-1], room_tokens=len(cue) + DECODED)
                held["opened_peak_kv_bytes"] = caches[-1].nbytes
                if self._shape.window is None:
                    caches[-1] = LeanCache(self._shape)
                    caches[-1].load(store.match(read.agent.ids).runs)
            speeds = tokens_per_s(self._engine, caches, cue)
            read.kv.crop(before)
            if precision:
                held["peak_kv_bytes"] = caches[-1].nbytes
            self._decoded[key] = {"native_tokens_per_s": speeds[0], "tokens_per_s": speeds[-1]} | held
        return self._decoded[key]

    def _agent(self, read: _Read, precision: Precision) -> dict[str, Any]:
        key = read.agent.name, precision
        if key not in self._seen:
            store = seal_all(read.kv, read.agent.ids, precision)
            working = KVCache(self._shape)
            bring(store, read.agent.ids, working)
            logits = (self._engine.logits(working, b.fed, len(b.targets)) for b in read.blocks)
            self._seen[key] = {"stored_bytes": store.nbytes} | _outcome(read, logits)
            store.clear()  # its nodes point at each other
        return self._seen[key]


def _outcome(read: _Read, logits: Iterable[Tensor]) -> dict[str, Any]:
    """Of one agent: mean KL and top-1 over all positions, losses where its text goes on, and what it answered."""
    kl: list[float] = []
    agrees: list[float] = []
    found: dict[str, list[Any]] = {"losses": [], "hits": [], "prefixes": []}
    for block, got, reference in zip(read.blocks, logits, read.references, strict=True):
        targets = torch.tensor(block.targets, device=got.device)
        likeliest = got.argmax(-1)
        kl += kl_divergences(reference, got).tolist()
        agrees += (likeliest == reference.argmax(-1)).tolist()
        right = (likeliest == targets).tolist()
        if block.kind == "continue":
            found["losses"] += torch.nn.functional.cross_entropy(got, targets, reduction="none").tolist()
        elif block.kind == "needle":
            found["hits"].append(all(right))
        elif block.kind == "code":
            found["prefixes"].append(([*right, False].index(False), len(right)))
    return {"agent": read.agent.name, "kl": statistics.fmean(kl), "top1": statistics.fmean(agrees)} | found


def _mean(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    losses, hits, prefixes = ([x for each in found for x in each[name]] for name in ("losses", "hits", "prefixes"))
    return {
        "mean_kl": statistics.fmean(each["kl"] for each in found),
        "top1": statistics.fmean(each["top1"] for each in found),
        "perplexity": math.exp(statistics.fmean(losses)),
        "needle_hits": statistics.fmean(hits) if hits else None,
        "equal_answers": sum(same == whole for same, whole in prefixes) if prefixes else None,
        "equal_prefix_tokens": statistics.fmean(same for same, _ in prefixes) if prefixes else None,
        "kl_by_agent": {each["agent"]: each["kl"] for each in found},
    }
