"""One loaded model, one page store, many agents.

Turns run one at a time on the host's own thread, in the order they came. Callers may live in any thread or
event loop; cancelling stops the decode loop between two tokens and leaves the store as it was.
"""

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from qkvshare_agents.access import Access
from qkvshare_agents.engine import Engine
from qkvshare_agents.errors import Cancelled, CodecError, ContextOverflow, HostClosed
from qkvshare_agents.exchange import Exchange
from qkvshare_agents.kv_cache import KVCache
from qkvshare_agents.ledger import Ledger, Roster
from qkvshare_agents.package import Package
from qkvshare_agents.page import Page, Precision, keep_native, preset, seal
from qkvshare_agents.planner import Mode, plan
from qkvshare_agents.report import HandoffReport
from qkvshare_agents.rotation import settle
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.shared_store import SharedPageStore
from qkvshare_agents.snapshot import SnapshotStore
from qkvshare_agents.speech import Speech
from qkvshare_agents.start import Start
from qkvshare_agents.transcript import Prompt, lay_out, ledger_keys
from qkvshare_agents.turn import Answer, Turn

_KEPT_REPORTS = 1000
_RESERVED_TOKENS = 512
T = TypeVar("T")


class Host:
    """Runs turns of many agents on one model. Use `submit` from threads, `asyncio.wrap_future` around it in loops."""

    def __init__(self, settings: HostSettings, engine: Engine | None = None) -> None:
        self.settings = settings
        self._precision = preset(settings.precision)
        self.ledger = Ledger()
        self.roster = Roster()
        self.reports: deque[HandoffReport] = deque(maxlen=_KEPT_REPORTS)
        self._engine = engine
        self._loading, self._settled = threading.Lock(), False
        self._store: SharedPageStore | None = None
        self._snapshots = SnapshotStore(settings.budget_bytes // 2)
        self._exchange = Exchange()
        self._root = b""
        self._kv: KVCache | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="qkvshare-host")
        self._pid = os.getpid()
        self._closed = False

    @property
    def engine(self) -> Engine:
        """The loaded model; loads it on first use."""
        with self._loading:
            if self._engine is None:
                s = self.settings
                self._engine = Engine.load(
                    s.model,
                    dtype=s.dtype,
                    device=s.device,
                    attn_implementation=s.attn_implementation,
                    thinking=s.thinking,
                )
            if not self._settled:
                _ = self._engine.fingerprint  # hashing the weights and probing are part of loading, not of a turn
                if self.settings.handoff:
                    self._precision = settle(self._precision, self._engine)
                self._settled = True
            return self._engine

    @property
    def precision(self) -> Precision:
        """How pages are sealed, with what the preset leaves to a probe of the model settled."""
        _ = self.engine
        return self._precision

    @property
    def store(self) -> SharedPageStore:
        """Pages of the model as it is now; an emptied store when its weights were changed."""
        salt = hashlib.sha256(self.settings.salt.encode()).digest()
        root = hashlib.sha256(self.engine.fingerprint.digest + salt).digest()
        if self._store is None or root != self._root:
            self._forget()
            pages_bytes = self.settings.budget_bytes // (2 if self.engine.has_state else 1)
            self._store, self._root = SharedPageStore(root, pages_bytes), root
        return self._store

    def submit(
        self,
        turn: Turn,
        *,
        on_text: Callable[[str], None] | None = None,
        cancelled: threading.Event | None = None,
    ) -> "Future[Answer]":
        """Queue a turn. on_text gets the text piece by piece on the host's thread. Setting `cancelled` ends the
        turn with Cancelled before its next token. Raises HostClosed; the future may raise ContextOverflow."""
        stop = cancelled or threading.Event()
        return self._queue(self._answer, turn, on_text or (lambda _: None), stop.is_set)

    def export(
        self, turn: Turn, *, have: Iterable[bytes] = (), handoff: str = "", metadata: Mapping[str, str] | None = None
    ) -> Package:
        """What another process needs to answer `turn` from KV, as far as it is stored here; waits for queued turns.

        have: content addresses that the receiver holds (`held` there); their pages stay here. handoff, metadata:
        free text that goes along. Raises PackageError when nothing is stored, or KV of this model can't be moved.
        """
        return self._queue(self._exchange.export, self, turn, frozenset(have), handoff, metadata or {}).result()

    def adopt(self, package: Package) -> tuple[str, ...]:
        """Take another process' pages and what its members said; returns why not, if not; waits for queued turns."""
        return self._queue(self._exchange.adopt, self, package).result()

    def _queue(self, work: Callable[..., T], *args: Any) -> "Future[T]":
        if os.getpid() != self._pid:
            raise HostClosed("this host was opened before the process forked; open one in the child")
        try:
            return self._worker.submit(work, *args)
        except RuntimeError as error:
            raise HostClosed(f"the host of {self.settings.model} is closed") from error

    def prompt(self, turn: Turn) -> Prompt:
        """The exact tokens that `turn` would be answered from now."""
        return lay_out(
            turn.messages,
            turn.speaker,
            self.roster.members(turn.scope),
            template=self.engine.template,
            ledger=self.ledger,
            layout=self.settings.layout,
            system=self.settings.system,
            view=turn.view,
        )

    def close(self) -> None:
        """Let the running turn end, refuse queued and further ones with HostClosed, free the model and all pages."""
        self._closed = True
        self._worker.shutdown(wait=True)
        self._forget()
        self._engine = self._store = self._kv = None

    def _forget(self) -> None:
        if self._store:
            self._store.clear()
        self._snapshots.clear()

    def _answer(self, turn: Turn, on_text: Callable[[str], None], cancelled: Callable[[], bool]) -> Answer:
        if cancelled():
            raise Cancelled("the turn was cancelled before it began")
        if self._closed:
            raise HostClosed(f"the host of {self.settings.model} was closed before this turn began")
        engine = self.engine  # loading is no part of the turn
        started = time.perf_counter()
        prompt = self.prompt(turn)
        room = engine.context_tokens - len(prompt.ids)
        if room < 1:
            who = turn.speaker.label or "an agent"
            raise ContextOverflow(
                f"context length exceeded: {len(prompt.ids)} tokens and one to come > {engine.context_tokens} ({who})"
            )
        longest = min(turn.sampling.max_tokens or room, room)
        start = self._begin(prompt, longest, turn.access)
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
        reasons = turn.arrival.reasons + start.plan.reasons + noticed + self._keep(start, (*prompt.ids, *speech.ids))
        quantize_ms = _ms_since(sealing)
        for key in ledger_keys(text, calls):
            self.ledger.record(key, speech.spoken_ids, (turn.scope, turn.speaker.name))
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
            replay_first_token_ms=self._replay_ms(prompt) if self.settings.measure_replay else None,
        )
        self.reports.append(report)
        handle = start.store.address((*prompt.ids, *speech.ids)) if start.store else ""
        return Answer(text, thought, calls, speech.finish_reason, len(prompt.ids), len(speech.ids), report, handle)

    def _begin(self, prompt: Prompt, longest: int, access: Access) -> Start:
        """Plan the turn and put the KV that it reuses into the working cache."""
        engine, total = self.engine, len(prompt.ids) + longest
        refusal = engine.refusal
        if not self.settings.handoff:
            refusal = "handoff is switched off (handoff=False)"
        elif engine.kv_limit_tokens and total > engine.kv_limit_tokens:
            refusal = f"{total} tokens may cross {engine.kv_limit_tokens}, where all keys get other rotary frequencies"
        if refusal or engine.shape is None:
            return Start(engine.begin(None), plan(prompt.settled, 0, refusal=refusal))
        store = self.store
        ids = prompt.ids[:-1]  # one token must be run in any case
        match = store.match(ids, access.readers)
        hidden = access.readers is not None and store.stored_tokens(ids) > match.tokens
        found, state = match.tokens, None
        if engine.has_state:
            state = self._snapshots.longest(ids[:found])
            match = match.head(state.tokens if state else 0)
        decision = plan(
            prompt.settled,
            match.tokens,
            evicted_pages=store.evicted_pages,
            withheld=access.reason if hidden else "",
            stateless_tokens=found - match.tokens,
        )
        importing = time.perf_counter()
        if self._kv is None or self._kv.shape != engine.shape:
            self._kv = KVCache(engine.shape)
        self._kv.clear(len(prompt.ids) + min(longest, _RESERVED_TOKENS))
        self._kv.load(match.runs)
        self._kv.state = state
        run = engine.begin(self._kv)
        return Start(run, decision, match, store, access.owners, _ms_since(importing), state)

    def _read(self, start: Start, prompt: Prompt, cancelled: Callable[[], bool]) -> Tensor:
        """Feed what was not handed over; returns the logits behind it. State is copied before the cue."""
        engine, position = self.engine, start.plan.reused_tokens
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

    def _keep(self, start: Start, ids: Sequence[int]) -> tuple[str, ...]:
        """Store the KV of what was fed; returns why not, if not."""
        kv, store = start.run.kv, start.store
        if kv is None or store is None:
            return ()

        def make_page(first: int, stop: int, sealed: bool) -> Page:
            spans = kv.span(first, stop)
            return seal(*spans, self.precision, starts_sequence=first == 0) if sealed else keep_native(*spans)

        fed = ids[: start.run.tokens]  # the last token of an answer that hit its limit was not fed
        try:
            sealed_tokens = len(fed) - self.precision.residual_length
            store.extend(fed, self.precision.page_size, sealed_tokens, make_page, start.owners)
        except CodecError as error:
            return (f"KV of this turn was not kept: {error}",)
        if state := self.engine.snapshot(start.run):
            start.snapshots[len(fed)] = state
        for tokens, snapshot in start.snapshots.items():
            self._snapshots.keep(fed[:tokens], snapshot)
        return ()

    def _replay_ms(self, prompt: Prompt) -> float:
        started = time.perf_counter()
        logits = self.engine.feed(self.engine.begin(None), prompt.ids)
        assert logits is not None
        int(logits.argmax())
        return _ms_since(started)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
