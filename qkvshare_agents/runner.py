"""Answers one turn: plans what it continues from, imports that, reads the rest, generates, keeps the KV."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkvshare_agents.assembly import Assembly
from qkvshare_agents.codec import kernels_name
from qkvshare_agents.composer import Composer
from qkvshare_agents.drift import canary_of
from qkvshare_agents.encoder import Ids
from qkvshare_agents.errors import Cancelled, CodecError, UnsupportedModel
from qkvshare_agents.fitter import whole
from qkvshare_agents.identity import active_from, without_adapters
from qkvshare_agents.keeping import seal_read
from qkvshare_agents.kv_cache import KVCache
from qkvshare_agents.lean_cache import LeanCache
from qkvshare_agents.packed_attention import begin as begin_packed
from qkvshare_agents.page import Page
from qkvshare_agents.planner import Mode, plan, stale_after
from qkvshare_agents.prefix_tree import NO_MATCH
from qkvshare_agents.replay import replay
from qkvshare_agents.report import HandoffReport
from qkvshare_agents.residents import Key
from qkvshare_agents.run import Run
from qkvshare_agents.snapshot import Snapshot
from qkvshare_agents.speech import Speech
from qkvshare_agents.start import Start, with_state
from qkvshare_agents.summary import Summaries
from qkvshare_agents.transcript import Prompt, ledger_key
from qkvshare_agents.turn import Answer, Turn

if TYPE_CHECKING:
    from qkvshare_agents.host import Host

_RESERVED_TOKENS = 512


class Runner:
    """Of one host, on the host's own thread. Keeps the working cache between turns."""

    def __init__(self, host: "Host") -> None:
        self._host = host
        self._kv: KVCache | None = None
        self._composer = Composer(host)
        self._summaries = Summaries(host)
        self._held: tuple[int, ...] = ()  # the ids whose KV the working cache still has, as the last turn used it

    def native(self, ids: Sequence[int]) -> KVCache | None:
        """The working cache if it still has the KV that `ids` were last continued with."""
        if isinstance(self._kv, LeanCache) or self._held[: len(ids)] != tuple(ids):
            return None
        return self._kv

    def lay_in(self, ids: Ids, kv: KVCache, owners: tuple[str, ...], why: str) -> None:
        """Store KV of `ids` that is an approximation, and say `why` in reports of turns that continue from it."""
        self._composer.lay_in(ids, kv, owners, why)

    def expected(
        self,
        runs: Iterable[tuple[Page, int]],
        ids: Sequence[int],
        count: int,
        state: Snapshot | None = None,
        *,
        apart: bool = False,
    ) -> Tensor:
        """Logits [count, V] behind each of the last `count` of `ids`, whose KV `runs` hold: read again behind it.

        state: what is behind all of `ids`; as it can't be cut, the last ones are read once more then. apart: in a cache
        of its own, so that the working cache keeps what it has.
        """
        shape = self._host.engine.shape
        assert shape is not None
        kv = KVCache(shape) if apart else self._working_cache(len(ids) + count)
        kv.load(runs)
        kv.state = state
        if state is None:
            kv.crop(len(ids) - count)
        return self._said(kv, ids[-count:])

    def expected_natively(self, ids: Sequence[int], count: int, state: Snapshot) -> Tensor | None:
        """The same behind the KV that the last turn computed; None if the working cache has no such KV any more."""
        kv = self.native(ids)
        if kv is None or len(self._held) != len(ids):
            return None
        kv.state = state
        return self._said(kv, ids[-count:])

    def _said(self, kv: KVCache, ids: Sequence[int]) -> Tensor:
        engine = self._host.engine
        with nullcontext() if self._speaks_plainly() else without_adapters(engine.model):
            return engine.logits(kv, ids, len(ids))

    def _speaks_plainly(self) -> bool:
        """Whether what the model says is what its KV's fingerprint stands for: no adapter changes the end alone."""
        return self._host.settings.lora == "refuse" or self._host.fingerprint == self._host.own_fingerprint

    def answer(
        self,
        turn: Turn,
        on_text: Callable[[str], None],
        cancelled: Callable[[], bool],
        prompt: Prompt | None = None,
    ) -> Answer:
        """prompt: the turn's, where it was laid out already."""
        engine = self._host.engine  # loading is no part of the turn
        started = time.perf_counter()
        prompt = prompt or self._host.prompt(turn)
        summed = self._summaries.shorten(turn, prompt, lambda asked: self.answer(asked, lambda _: None, cancelled).text)
        turn, prompt = summed.turn, summed.prompt
        fixed = None if active_from(engine.model, prompt.ids) is None else "tokens in the prompt activate an adapter"
        fitted = self._composer.fit(turn, prompt, self._refusal(self._host.context_tokens) or fixed)
        prompt, room = fitted.prompt, self._host.context_tokens - fitted.tokens
        longest = min(turn.sampling.max_tokens or room, room)
        if fitted.source is None:
            start = self._begin(prompt, longest, turn)
        else:
            start = self._composer.assemble(
                fitted, turn, self._working_cache(fitted.tokens + _RESERVED_TOKENS, moved=True)
            )
        start = start if fixed else self._composer.splice(start, prompt, turn, cancelled)
        reused = start.plan.reused_tokens
        with self._composer.watching():
            logits = self._read(start, prompt, cancelled)
        if engine.observer and (units := engine.observer.take()):
            self._host.residents.observe(_key(turn), units)
        first = logits.clone() if self._host.settings.measure_replay else None
        speech = Speech(engine, turn, longest, on_text)
        first_ms = None
        if speech.add(logits):
            first_ms = _ms_since(started)
            ids = (*prompt.ids, *speech.ids)
            self._host.decode(engine, start.run, ids, speech.left, speech.choose, cancelled)
        first_ms = first_ms or _ms_since(started)
        text, thought, calls = speech.finish()
        sealing = time.perf_counter()
        noticed = (turn.access.notice,) if turn.access.notice and start.plan.mode is not Mode.KV else ()
        reasons = (*turn.arrival.reasons, *summed.reasons, *fitted.reasons, *start.plan.reasons, *noticed)
        dropped_tokens = summed.dropped_tokens + fitted.dropped_tokens
        reasons += self._keep(start, (*prompt.ids, *speech.ids), prompt, turn)
        quantize_ms = _ms_since(sealing)
        self._host.ledger.record(ledger_key(text, calls), speech.spoken_ids, (turn.scope, turn.speaker.name))
        total_ms = _ms_since(started)
        replay_ms, replay_kl = replay(engine, whole(fitted).ids, first) if first is not None else (None, None)
        report = HandoffReport(
            agent=turn.speaker.name,
            source=prompt.last_answerer(start.covered),
            mode=Mode.PARTIAL if dropped_tokens and start.plan.mode is Mode.KV else start.plan.mode,
            reasons=reasons,
            prompt_tokens=fitted.tokens,
            reused_tokens=reused,
            generated_tokens=len(speech.ids),
            payload_bytes=start.payload_bytes,
            fp16_bytes=start.fp16_bytes,
            import_ms=start.import_ms,
            transfer_ms=turn.arrival.transfer_ms,
            first_token_ms=first_ms,
            quantize_ms=quantize_ms,
            total_ms=total_ms,
            replay_first_token_ms=replay_ms,
            replay_kl=None if fitted.dropped_tokens else replay_kl,
            dropped_tokens=dropped_tokens,
            kernels=kernels_name(engine.shape.device) if start.store and engine.shape else "",
            hops=start.hops,
            canary_nats=turn.arrival.canary_nats,
            canary_ms=turn.arrival.canary_ms,
        )
        self._host.reports.append(report)
        handle = start.store.address(start.path((*prompt.ids, *speech.ids))) if start.store else ""
        return Answer(text, thought, calls, speech.finish_reason, fitted.tokens, len(speech.ids), report, handle)

    def _refusal(self, total: int) -> str | None:
        """Why KV can't be handed over in a turn that may come to `total` tokens."""
        engine = self._host.engine
        if not self._host.settings.handoff:
            return "handoff is switched off (handoff=False)"
        if engine.kv_limit_tokens and total > engine.kv_limit_tokens:
            return f"{total} tokens may cross {engine.kv_limit_tokens}, where all keys get other rotary frequencies"
        return engine.refusal or (None if engine.shape else "the model's KV has no shape that can be stored")

    def _working_cache(self, tokens: int, *, moved: bool = False) -> KVCache:
        """Emptied, with room for `tokens`. moved: what is loaded will be written to, so it can't stay packed."""
        shape, settings = self._host.engine.shape, self._host.settings
        assert shape is not None
        native = settings.splice or moved or shape.window or shape.indexed or not shape.layers
        kind = LeanCache if settings.packed_history and not native else KVCache
        if type(self._kv) is not kind or self._kv.shape != shape:
            self._kv = kind(shape)
        self._held = ()
        self._kv.clear(tokens)
        return self._kv

    def _begin(self, prompt: Prompt, longest: int, turn: Turn) -> Start:
        """Plan the turn and put the KV that it reuses into the working cache."""
        engine, access = self._host.engine, turn.access
        active = active_from(engine.model, prompt.ids)
        if refusal := self._refusal(len(prompt.ids) + longest):
            return Start(replace(engine.begin(None), active_from=active), plan(prompt.settled, 0, refusal=refusal))
        store = self._host.store
        ids = prompt.ids[:-1][:active]  # one token must be run in any case
        match = store.match(ids, access.readers)
        found, state = match.agreeing, None
        hidden = access.readers is not None and store.stored_tokens(ids) > found
        if engine.has_state:
            match, state = with_state(match, ids, self._host.snapshots)
        hops = max((page.hops for page, _ in match.runs), default=0)
        stale = stale_after(hops, self._host.settings.refresh_every) if match.tokens else None
        if stale:
            match, state, found = NO_MATCH, None, 0
        decision = plan(
            prompt.settled,
            match.tokens,
            refusal=stale,
            evicted_pages=store.evicted_pages,
            withheld=access.reason if hidden else "",
            stateless_tokens=found - match.tokens,
        )
        if others := match.not_by(self._host.adapters):
            why = f"KV of {others} tokens was computed with other LoRA adapters, which is an approximation"
            decision = replace(decision, reasons=(*decision.reasons, why))
        if active is not None and active < prompt.settled:
            why = f"from token {active} on an adapter is active, and KV that is computed with it is not kept"
            decision = replace(decision, reasons=(*decision.reasons, why))
        importing = time.perf_counter()
        kv = self._working_cache(len(prompt.ids) + min(longest, _RESERVED_TOKENS))
        kv.load(match.runs)
        kv.state = state
        if match.tokens:  # this handoff counts once: moving between processes did so already
            hops = max(1, hops if turn.arrival.moved_bytes and not turn.arrival.alarmed else hops + 1)
        hops = hops if match.tokens else 0
        import_ms = _ms_since(importing)
        run = replace(self._run_on(kv), active_from=active)
        return Start(
            run, decision, match, store, access.owners, import_ms, state, hops=hops, renews=bool(stale),
            covered=match.tokens,
        )  # fmt: skip

    def _run_on(self, kv: KVCache) -> Run:
        engine = self._host.engine
        if isinstance(kv, LeanCache):
            with suppress(UnsupportedModel):  # then one layer after the other becomes native
                return replace(begin_packed(engine, kv.packed), kv=kv)
        return engine.begin(kv)

    def _read(self, start: Start, prompt: Prompt, cancelled: Callable[[], bool]) -> Tensor:
        """Feed what was not handed over; returns the logits behind it. State is copied before the cue."""
        engine, position = self._host.engine, start.covered
        stops, settled = [len(prompt.ids)], len(prompt.ids[: prompt.settled][: start.run.active_from])
        if engine.has_state and start.store and position < settled:
            stops.insert(0, settled)
        while True:
            stop = stops.pop(0)
            logits = engine.feed(start.run, prompt.ids[position:stop], cancelled)
            if logits is None:
                raise Cancelled("the turn was cancelled while it read its prompt")
            if not stops:
                return logits
            if state := engine.snapshot(start.run):
                start.snapshots[stop] = state
            position = stop

    def _keep(self, start: Start, ids: Ids, prompt: Prompt, turn: Turn) -> tuple[str, ...]:
        """Store the KV of what was fed; returns why not, if not, and whether others' pages had to go."""
        kv, store = start.run.kv, start.store
        if kv is None or store is None:
            return ()
        # the last token of an answer that hit its limit was not fed
        last = start.assembly or Assembly()
        fed = ids[: len(last.prefix) + start.run.tokens - last.tokens]
        self._held = () if start.assembly else fed
        fed, plainly = fed[: start.run.active_from], start.run.active_from is None and self._speaks_plainly()
        evicted, precision, sealed_tokens = store.evicted_pages, self._host.precision_of(_key(turn)), 0
        by = self._host.adapters
        try:
            for assembly, read in (*start.earlier, (start.assembly, fed)):
                sealed_tokens += seal_read(start, kv, read, assembly or Assembly(), prompt, precision, by)
        except CodecError as error:
            return (f"KV of this turn was not kept: {error}",)
        self._host.residents.note_turn(_key(turn), fed, sealed_tokens, min(prompt.header, len(fed)))
        self._composer.keep(start, fed, prompt, turn)
        if start.assembly is None and plainly and not self._host.engine.has_state:
            self._host.canaries.keep(fed, canary_of(torch.stack(tuple(start.run.expected))))
        state = self._host.engine.snapshot(start.run)
        if state and state.tokens == len(fed):  # else it is behind tokens that were read with an adapter
            start.snapshots[len(fed)] = state
        for tokens, snapshot in start.snapshots.items():
            self._host.snapshots.keep(fed[:tokens], snapshot)
        if dropped := store.evicted_pages - evicted:
            self._host.residents.forget_gone(store.stored_tokens)
            return (f"{dropped} pages were dropped, least recently used first: {store.budget_bytes:,} bytes are full",)
        return ()


def _key(turn: Turn) -> Key:
    return turn.scope, turn.speaker.name


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
