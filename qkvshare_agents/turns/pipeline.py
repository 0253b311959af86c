"""Answers one turn: prepare it, find the stored prefix, import that, prefill the rest, generate, store, report."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from qkvshare_agents.budget.agents import Key
from qkvshare_agents.context.composer import Composer
from qkvshare_agents.context.fit import Fitted, whole
from qkvshare_agents.context.summary import Summaries
from qkvshare_agents.errors import Cancelled, CodecError
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.codec import kernels_name
from qkvshare_agents.model.adapters import active_from
from qkvshare_agents.model.canary import canary_of
from qkvshare_agents.prompt.layout import Prompt, ledger_key
from qkvshare_agents.store.assembly import Assembly
from qkvshare_agents.store.prefix_tree import NO_MATCH
from qkvshare_agents.turns.account import Account
from qkvshare_agents.turns.baseline import replay
from qkvshare_agents.turns.generation import Speech
from qkvshare_agents.turns.plan import Mode, plan, stale_after
from qkvshare_agents.turns.prefix import Start, with_state
from qkvshare_agents.turns.request import Answer, Turn
from qkvshare_agents.turns.store_turn import seal_read
from qkvshare_agents.turns.working import Working
from qkvshare_agents.turns.workspace import Workspace

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
        account, space = Account(turn, spent_ms), self._space
        turn, prompt = self._prepare(turn, prompt or space.prompt(turn), account, cancelled)
        fitted, start, longest = self._find_prefix(turn, prompt, account, cancelled)
        logits = self._prefill(start, fitted.prompt, turn, cancelled)
        first = logits.clone() if space.settings.measure_replay else None
        speech = Speech(space.engine, turn, longest, on_text)
        self._generate(start, fitted.prompt, speech, logits, account, cancelled)
        text, thought, calls = speech.finish()
        ids = (*fitted.prompt.ids, *speech.ids)
        with account.timing("quantize"):
            account.because(*self._store(start, ids, fitted.prompt, turn))
        space.ledger.record(ledger_key(text, calls), speech.spoken_ids, turn.scope, turn.speaker.name)
        account.lap("total")
        if first is not None:
            account.replayed = replay(space.engine, whole(fitted).ids, first)
        kernels = kernels_name(space.engine.shape.device) if space.engine.shape else ""
        report = account.report(turn, fitted, start, len(speech.ids), kernels)
        space.reports.append(report)
        handle = start.store.address(start.path(ids)) if start.store else ""
        return Answer(text, thought, calls, speech.finish_reason, fitted.tokens, len(speech.ids), report, handle)

    def _prepare(
        self, turn: Turn, prompt: Prompt, account: Account, cancelled: Callable[[], bool]
    ) -> tuple[Turn, Prompt]:
        """The turn with its older messages summed up, if it is too long and that is asked for."""
        summed = self._summaries.shorten(turn, prompt, lambda asked: self.answer(asked, lambda _: None, cancelled).text)
        account.because(*summed.reasons, dropped_tokens=summed.dropped_tokens)
        return summed.turn, summed.prompt

    def _find_prefix(
        self, turn: Turn, prompt: Prompt, account: Account, cancelled: Callable[[], bool]
    ) -> tuple[Fitted, Start, int]:
        """What fits of the prompt, with the stored KV that it begins with in the working cache; and how many tokens the
        answer may have."""
        context = self._space.context_tokens
        active = active_from(self._space.engine.model, prompt.ids)
        fixed = None if active is None else "tokens in the prompt activate an adapter"
        fitted = self._composer.fit(turn, prompt, self._refusal(context) or fixed)
        room = context - fitted.tokens
        longest = min(turn.sampling.max_tokens or room, room)
        if fitted.source is None:
            start = self._begin(fitted.prompt, longest, turn)
        else:
            kv = self._working.emptied(fitted.tokens + _RESERVED_TOKENS, moved=True)
            start = self._composer.assemble(fitted, turn, kv)
        if not fixed:
            start = self._composer.splice(start, fitted.prompt, turn, cancelled)
        account.because(*fitted.reasons, *start.plan.reasons, dropped_tokens=fitted.dropped_tokens)
        if turn.access.notice and start.plan.mode is not Mode.KV:
            account.because(turn.access.notice)
        return fitted, start, longest

    def _prefill(self, start: Start, prompt: Prompt, turn: Turn, cancelled: Callable[[], bool]) -> Tensor:
        """Feed what was not handed over, under the eyes of whoever looks at attention; returns the logits behind it."""
        with self._composer.watching():
            logits = self._read(start, prompt, cancelled)
        observer = self._space.engine.observer
        if observer and (units := observer.take()):
            self._space.residents.observe(_key(turn), units)
        return logits

    def _generate(
        self,
        start: Start,
        prompt: Prompt,
        speech: Speech,
        logits: Tensor,
        account: Account,
        cancelled: Callable[[], bool],
    ) -> None:
        goes_on = speech.add(logits)
        account.lap("first_token")
        if goes_on:
            ids = (*prompt.ids, *speech.ids)
            self._space.decode(self._space.engine, start.run, ids, speech.left, speech.choose, cancelled)

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

    def _store(self, start: Start, ids: Ids, prompt: Prompt, turn: Turn) -> tuple[str, ...]:
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
