"""Answers one turn: plans what it continues from, imports that, reads the rest, generates, keeps the KV."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from qkvshare_agents.assembly import Assembly
from qkvshare_agents.codec import kernels_name
from qkvshare_agents.composer import Composer
from qkvshare_agents.drift import canary_of
from qkvshare_agents.encoder import Ids
from qkvshare_agents.errors import Cancelled, CodecError
from qkvshare_agents.fitter import whole
from qkvshare_agents.identity import active_from
from qkvshare_agents.keeping import seal_read
from qkvshare_agents.planner import Mode, plan, stale_after
from qkvshare_agents.prefix_tree import NO_MATCH
from qkvshare_agents.replay import replay
from qkvshare_agents.report import HandoffReport
from qkvshare_agents.residents import Key
from qkvshare_agents.speech import Speech
from qkvshare_agents.start import Start, with_state
from qkvshare_agents.summary import Summaries
from qkvshare_agents.transcript import Prompt, ledger_key
from qkvshare_agents.turn import Answer, Turn
from qkvshare_agents.working import Working
from qkvshare_agents.workspace import Workspace

_RESERVED_TOKENS = 512


class Runner:
    """Of one workspace, on the host's own thread."""

    def __init__(self, space: Workspace, working: Working, composer: Composer) -> None:
        self._space, self._working, self._composer = space, working, composer
        self._summaries = Summaries(space)

    def answer(
        self,
        turn: Turn,
        on_text: Callable[[str], None],
        cancelled: Callable[[], bool],
        *,
        prompt: Prompt | None = None,
        spent_ms: float = 0.0,
    ) -> Answer:
        """prompt: the turn's, where it was laid out already. spent_ms: on this turn before it came here."""
        engine, started = self._space.engine, time.perf_counter() - spent_ms / 1000
        prompt = prompt or self._space.prompt(turn)
        summed = self._summaries.shorten(turn, prompt, lambda asked: self.answer(asked, lambda _: None, cancelled).text)
        turn, prompt = summed.turn, summed.prompt
        fixed = None if active_from(engine.model, prompt.ids) is None else "tokens in the prompt activate an adapter"
        fitted = self._composer.fit(turn, prompt, self._refusal(self._space.context_tokens) or fixed)
        prompt, room = fitted.prompt, self._space.context_tokens - fitted.tokens
        longest = min(turn.sampling.max_tokens or room, room)
        if fitted.source is None:
            start = self._begin(prompt, longest, turn)
        else:
            start = self._composer.assemble(
                fitted, turn, self._working.emptied(fitted.tokens + _RESERVED_TOKENS, moved=True)
            )
        start = start if fixed else self._composer.splice(start, prompt, turn, cancelled)
        reused = start.plan.reused_tokens
        with self._composer.watching():
            logits = self._read(start, prompt, cancelled)
        if engine.observer and (units := engine.observer.take()):
            self._space.residents.observe(_key(turn), units)
        first = logits.clone() if self._space.settings.measure_replay else None
        speech = Speech(engine, turn, longest, on_text)
        first_ms = None
        if speech.add(logits):
            first_ms = _ms_since(started)
            ids = (*prompt.ids, *speech.ids)
            self._space.decode(engine, start.run, ids, speech.left, speech.choose, cancelled)
        first_ms = first_ms or _ms_since(started)
        text, thought, calls = speech.finish()
        sealing = time.perf_counter()
        noticed = (turn.access.notice,) if turn.access.notice and start.plan.mode is not Mode.KV else ()
        reasons = (*turn.arrival.reasons, *summed.reasons, *fitted.reasons, *start.plan.reasons, *noticed)
        dropped_tokens = summed.dropped_tokens + fitted.dropped_tokens
        reasons += self._keep(start, (*prompt.ids, *speech.ids), prompt, turn)
        quantize_ms = _ms_since(sealing)
        self._space.ledger.record(ledger_key(text, calls), speech.spoken_ids, turn.scope, turn.speaker.name)
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
        self._space.reports.append(report)
        handle = start.store.address(start.path((*prompt.ids, *speech.ids))) if start.store else ""
        return Answer(text, thought, calls, speech.finish_reason, fitted.tokens, len(speech.ids), report, handle)

    def _refusal(self, total: int) -> str | None:
        """Why KV can't be handed over in a turn that may come to `total` tokens."""
        limit = self._space.engine.kv_limit_tokens
        if limit and total > limit and self._space.settings.handoff:
            return f"{total} tokens may cross {limit}, where all keys get other rotary frequencies"
        return self._space.refusal

    def _begin(self, prompt: Prompt, longest: int, turn: Turn) -> Start:
        """Plan the turn and put the KV that it reuses into the working cache."""
        engine, access = self._space.engine, turn.access
        active = active_from(engine.model, prompt.ids)
        if refusal := self._refusal(len(prompt.ids) + longest):
            return Start(replace(engine.begin(None), active_from=active), plan(prompt.settled, 0, refusal=refusal))
        store = self._space.store
        ids = prompt.ids[:-1][:active]  # one token must be run in any case
        match = store.match(ids, access.readers)
        found, state = match.agreeing, None
        hidden = access.readers is not None and store.stored_tokens(ids) > found
        if engine.has_state:
            match, state = with_state(match, ids, self._space.snapshots)
        hops = max((page.hops for page, _ in match.runs), default=0)
        stale = stale_after(hops, self._space.settings.refresh_every) if match.tokens else None
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
        if others := match.not_by(self._space.adapters):
            why = f"KV of {others} tokens was computed with other LoRA adapters, which is an approximation"
            decision = replace(decision, reasons=(*decision.reasons, why))
        if active is not None and active < prompt.settled:
            why = f"from token {active} on an adapter is active, and KV that is computed with it is not kept"
            decision = replace(decision, reasons=(*decision.reasons, why))
        importing = time.perf_counter()
        kv = self._working.emptied(len(prompt.ids) + min(longest, _RESERVED_TOKENS))
        kv.load(match.runs)
        kv.state = state
        if match.tokens:  # this handoff counts once: moving between processes did so already
            hops = max(1, hops if turn.arrival.moved_bytes and not turn.arrival.alarmed else hops + 1)
        hops = hops if match.tokens else 0
        import_ms = _ms_since(importing)
        run = replace(self._working.run_on(kv), active_from=active)
        return Start(
            run, decision, match, store, access.owners, import_ms, state, hops=hops, renews=bool(stale),
            covered=match.tokens,
        )  # fmt: skip

    def _read(self, start: Start, prompt: Prompt, cancelled: Callable[[], bool]) -> Tensor:
        """Feed what was not handed over; returns the logits behind it. State is copied before the cue."""
        engine, position = self._space.engine, start.covered
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
        self._working.held = () if start.assembly else fed
        fed, plainly = fed[: start.run.active_from], start.run.active_from is None and self._space.speaks_plainly
        evicted, precision, sealed_tokens = store.evicted_pages, self._space.precision_of(_key(turn)), 0
        by = self._space.adapters
        try:
            for assembly, read in (*start.earlier, (start.assembly, fed)):
                sealed_tokens += seal_read(start, kv, read, assembly or Assembly(), prompt, precision, by)
        except CodecError as error:
            return (f"KV of this turn was not kept: {error}",)
        self._space.residents.note_turn(_key(turn), fed, sealed_tokens, min(prompt.header, len(fed)))
        self._composer.keep(start, fed, prompt, turn)
        if start.assembly is None and plainly and not self._space.engine.has_state:
            self._space.canaries.keep(fed, canary_of(torch.stack(tuple(start.run.expected))))
        state = self._space.engine.snapshot(start.run)
        if state and state.tokens == len(fed):  # else it is behind tokens that were read with an adapter
            start.snapshots[len(fed)] = state
        for tokens, snapshot in start.snapshots.items():
            self._space.snapshots.keep(fed[:tokens], snapshot)
        if dropped := store.evicted_pages - evicted:
            self._space.residents.forget_gone(store.stored_tokens)
            return (f"{dropped} pages were dropped, least recently used first: {store.budget_bytes:,} bytes are full",)
        return ()


def _key(turn: Turn) -> Key:
    return turn.scope, turn.speaker.name


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
