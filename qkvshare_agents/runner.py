"""Answers one turn: plans what it continues from, imports that, reads the rest, generates, keeps the KV."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkvshare_agents.drift import canary_of
from qkvshare_agents.errors import Cancelled, CodecError, ContextOverflow
from qkvshare_agents.kv_cache import KVCache
from qkvshare_agents.page import Page, keep_native, seal
from qkvshare_agents.page_store import NO_MATCH
from qkvshare_agents.planner import Mode, plan, stale_after
from qkvshare_agents.report import HandoffReport
from qkvshare_agents.speech import Speech
from qkvshare_agents.start import Start
from qkvshare_agents.transcript import Prompt, ledger_keys
from qkvshare_agents.turn import Answer, Turn

if TYPE_CHECKING:
    from qkvshare_agents.host import Host

_RESERVED_TOKENS = 512


class Runner:
    """Of one host, on the host's own thread. Keeps the working cache between turns."""

    def __init__(self, host: "Host") -> None:
        self._host = host
        self._kv: KVCache | None = None
        self._held: tuple[int, ...] = ()  # the ids whose KV the working cache still has, as the last turn used it

    def native(self, ids: Sequence[int]) -> KVCache | None:
        """The working cache if it still has the KV that `ids` were last continued with."""
        return self._kv if self._held[: len(ids)] == tuple(ids) else None

    def expected(
        self, runs: Iterable[tuple[Page, int]], ids: Sequence[int], count: int, *, apart: bool = False
    ) -> Tensor:
        """Logits [count, V] behind each of the last `count` of `ids`, whose KV `runs` hold: read again behind it.

        apart: in a cache of its own, so that the working cache keeps what it has.
        """
        shape = self._host.engine.shape
        assert shape is not None
        kv = KVCache(shape) if apart else self._working_cache(len(ids))
        kv.load(runs)
        kv.crop(len(ids) - count)
        return self._host.engine.logits(kv, ids[-count:], count)

    def answer(self, turn: Turn, on_text: Callable[[str], None], cancelled: Callable[[], bool]) -> Answer:
        engine = self._host.engine  # loading is no part of the turn
        started = time.perf_counter()
        prompt = self._host.prompt(turn)
        room = engine.context_tokens - len(prompt.ids)
        if room < 1:
            who = turn.speaker.label or "an agent"
            raise ContextOverflow(
                f"context length exceeded: {len(prompt.ids)} tokens and one to come > {engine.context_tokens} ({who})"
            )
        longest = min(turn.sampling.max_tokens or room, room)
        start = self._begin(prompt, longest, turn)
        reused = start.plan.reused_tokens
        logits = self._read(start, prompt, cancelled)
        speech = Speech(engine, turn, longest, on_text)
        first_ms = None
        while speech.add(logits):
            first_ms = first_ms or _ms_since(started)
            following = engine.feed(start.run, speech.ids[-1:], cancelled)
            if following is None:
                raise Cancelled(f"the turn was cancelled after {len(speech.ids)} tokens")
            logits = following
        first_ms = first_ms or _ms_since(started)
        text, thought, calls = speech.finish()
        sealing = time.perf_counter()
        noticed = (turn.access.notice,) if turn.access.notice and start.plan.mode is not Mode.KV else ()
        reasons = turn.arrival.reasons + start.plan.reasons + noticed + self._keep(start, prompt, speech.ids)
        quantize_ms = _ms_since(sealing)
        for key in ledger_keys(text, calls):
            self._host.ledger.record(key, speech.spoken_ids, (turn.scope, turn.speaker.name))
        total_ms = _ms_since(started)
        report = HandoffReport(
            agent=turn.speaker.name,
            source=prompt.last_answerer(reused),
            mode=start.plan.mode,
            reasons=reasons,
            prompt_tokens=len(prompt.ids),
            reused_tokens=reused,
            generated_tokens=len(speech.ids),
            payload_bytes=start.payload_bytes,
            fp16_bytes=start.fp16_bytes,
            import_ms=start.import_ms,
            transfer_ms=turn.arrival.transfer_ms,
            first_token_ms=first_ms,
            quantize_ms=quantize_ms,
            total_ms=total_ms,
            replay_first_token_ms=self._replay_ms(prompt) if self._host.settings.measure_replay else None,
            hops=start.hops,
            canary_nats=turn.arrival.canary_nats,
            canary_ms=turn.arrival.canary_ms,
        )
        self._host.reports.append(report)
        handle = start.store.address((*prompt.ids, *speech.ids)) if start.store else ""
        return Answer(text, thought, calls, speech.finish_reason, len(prompt.ids), len(speech.ids), report, handle)

    def _working_cache(self, tokens: int) -> KVCache:
        """Emptied, with room for `tokens`."""
        shape = self._host.engine.shape
        assert shape is not None
        if self._kv is None or self._kv.shape != shape:
            self._kv = KVCache(shape)
        self._held = ()
        self._kv.clear(tokens)
        return self._kv

    def _begin(self, prompt: Prompt, longest: int, turn: Turn) -> Start:
        """Plan the turn and put the KV that it reuses into the working cache."""
        engine, total, access = self._host.engine, len(prompt.ids) + longest, turn.access
        refusal = engine.refusal
        if not self._host.settings.handoff:
            refusal = "handoff is switched off (handoff=False)"
        elif engine.kv_limit_tokens and total > engine.kv_limit_tokens:
            refusal = f"{total} tokens may cross {engine.kv_limit_tokens}, where all keys get other rotary frequencies"
        if refusal or engine.shape is None:
            return Start(engine.begin(None), plan(prompt.settled, 0, refusal=refusal))
        store = self._host.store
        ids = prompt.ids[:-1]  # one token must be run in any case
        match = store.match(ids, access.readers)
        found, state = match.agreeing, None
        hidden = access.readers is not None and store.stored_tokens(ids) > found
        while engine.has_state and match.tokens and (state is None or match.tokens < state.tokens):
            state = self._host.snapshots.longest(ids[: match.tokens])
            match = match.head(state.tokens if state else 0)
        state = state if match.tokens else None
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
        importing = time.perf_counter()
        kv = self._working_cache(len(prompt.ids) + min(longest, _RESERVED_TOKENS))
        kv.load(match.runs)
        kv.state = state
        if match.tokens:  # this handoff counts once: moving between processes did so already
            hops = max(1, hops if turn.arrival.moved_bytes and not turn.arrival.alarmed else hops + 1)
        hops = hops if match.tokens else 0
        import_ms = _ms_since(importing)
        return Start(
            engine.begin(kv), decision, match, store, access.owners, import_ms, state, hops=hops, renews=bool(stale)
        )

    def _read(self, start: Start, prompt: Prompt, cancelled: Callable[[], bool]) -> Tensor:
        """Feed what was not handed over; returns the logits behind it. State is copied before the cue."""
        engine, position = self._host.engine, start.plan.reused_tokens
        stops = [len(prompt.ids)]
        if engine.has_state and start.store and position < prompt.settled:
            stops.insert(0, prompt.settled)
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

    def _keep(self, start: Start, prompt: Prompt, spoken: Sequence[int]) -> tuple[str, ...]:
        """Store the KV of what was fed; returns why not, if not."""
        kv, store = start.run.kv, start.store
        if kv is None or store is None:
            return ()

        def make_page(first: int, stop: int, sealed: bool) -> Page:
            span, precision = kv.span(first, stop), self._host.precision
            if window and not window.sees(first, stop, points):
                span = span.without(window.layers)
            page = seal(span, precision, starts_sequence=first == 0) if sealed else keep_native(span)
            return replace(page, hops=start.hops)

        fed = (*prompt.ids, *spoken)[: start.run.tokens]  # the last token of an answer that hit its limit was not fed
        window, points = store.window, (prompt.settled, len(fed))
        self._held = fed
        try:
            if start.renews:
                store.renew(fed, make_page)
            store.extend(
                fed,
                self._host.precision.page_size,
                len(fed) - self._host.precision.residual_length,
                make_page,
                start.owners,
                points=points,
                computed_from=start.plan.reused_tokens,
            )
        except CodecError as error:
            return (f"KV of this turn was not kept: {error}",)
        self._host.canaries.keep(fed, canary_of(torch.stack(tuple(start.run.expected))))
        if state := self._host.engine.snapshot(start.run):
            start.snapshots[len(fed)] = state
        for tokens, snapshot in start.snapshots.items():
            self._host.snapshots.keep(fed[:tokens], snapshot)
        return ()

    def _replay_ms(self, prompt: Prompt) -> float:
        started = time.perf_counter()
        logits = self._host.engine.feed(self._host.engine.begin(None), prompt.ids)
        assert logits is not None
        int(logits.argmax())
        return _ms_since(started)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
