"""One loaded model, one page store, many agents.

Turns run one at a time on the host's own thread, in the order they came. Callers may live in any thread or
event loop; cancelling stops the decode loop between two tokens and leaves the store as it was.
"""

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from qkvshare_agents import decoding, rotary, status
from qkvshare_agents import projector as projectors
from qkvshare_agents.codec import prepare
from qkvshare_agents.drift import Canaries
from qkvshare_agents.engine import Engine
from qkvshare_agents.errors import Cancelled, HostBusy, HostClosed, InvalidSetting
from qkvshare_agents.exchange import Exchange
from qkvshare_agents.fingerprint import Fingerprint
from qkvshare_agents.identity import BASE
from qkvshare_agents.ledger import Ledger, Roster
from qkvshare_agents.lora import adapters_leave_kv
from qkvshare_agents.observation import Observer
from qkvshare_agents.package import Package
from qkvshare_agents.page import Precision
from qkvshare_agents.projector import Projector
from qkvshare_agents.report import Arrival, HandoffReport
from qkvshare_agents.residents import Key, Residents
from qkvshare_agents.rotary import Rotary
from qkvshare_agents.rotation import settle
from qkvshare_agents.runner import Runner
from qkvshare_agents.settings import JOINT, HostSettings
from qkvshare_agents.shared_store import SharedPageStore
from qkvshare_agents.snapshot import SnapshotStore
from qkvshare_agents.status import Notice
from qkvshare_agents.transcript import Prompt, lay_out
from qkvshare_agents.turn import Answer, Turn

_KEPT_REPORTS = 1000
T = TypeVar("T")


class _Queued(Future[T]):
    """What a host will answer. Waiting for it on the host's own thread raises HostBusy: that would never end."""

    def __init__(self, host_thread: Callable[[], int]) -> None:
        super().__init__()
        self._host_thread = host_thread

    def result(self, timeout: float | None = None) -> T:
        self._check()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check()
        return super().exception(timeout)

    def _check(self) -> None:
        if not self.done() and threading.get_ident() == self._host_thread():
            raise HostBusy(
                "a callback of a turn waits for another turn, which begins only when this one has ended: queue it here "
                "and take its result elsewhere (add_done_callback, or another thread)"
            )


class Host:
    """Runs turns of many agents on one model. Use `submit` from threads, `asyncio.wrap_future` around it in loops."""

    def __init__(self, settings: HostSettings, engine: Engine | None = None) -> None:
        self.settings = settings
        self._precision = settings.base_precision
        self.ledger = Ledger()
        self.roster = Roster()
        self.reports: deque[HandoffReport] = deque(maxlen=_KEPT_REPORTS)
        self._engine = engine
        self._loading, self._settled = threading.Lock(), False
        self.rotary = Rotary(refusal="handoff is switched off (handoff=False)")  # until the model is loaded
        self._store: SharedPageStore | None = None
        self.snapshots = SnapshotStore(settings.budget_bytes // 2)
        self.canaries = Canaries()
        self._exchange = Exchange()
        self.residents = Residents(self._precision, None)
        self._notice = Notice(self.status)
        self._projectors: list[Projector] = []
        self._runner = Runner(self)
        self._root = b""
        self._leaves_kv: dict[bytes, bool] = {}  # by fingerprint: whether its adapters change no KV
        self._looked_at: Fingerprint | None = None  # the model's, by the work that runs
        self._thread = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="qkvshare-host", initializer=self._began)
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
                    device_map=s.device_map,
                    offload_folder=s.offload_folder,
                    attn_implementation=s.attn_implementation,
                    thinking=s.thinking,
                )
            if not self._settled:
                self.decode = decoding.chosen(self.settings.decoding, self._engine)
                _ = self._engine.fingerprint  # hashing the weights and probing are part of loading, not of a turn
                if self.settings.handoff:
                    for device in self._engine.devices:
                        prepare(device)
                    self._precision = settle(self._precision, self._engine)
                    self.rotary = rotary.of_stored(self._engine)
                self._settle_in(self._engine)
                self._projectors = [self._projector(path) for path in self.settings.projectors]
                self._settled = True
            return self._engine

    @property
    def own_fingerprint(self) -> Fingerprint:
        """The model's own. On the host's thread it is taken once for a turn, or whatever else runs there."""
        if threading.get_ident() != self._thread:
            return self.engine.fingerprint
        self._looked_at = self._looked_at or self.engine.fingerprint
        return self._looked_at

    @property
    def fingerprint(self) -> Fingerprint:
        """Of what computes KV now: the base alone, where adapters leave its KV as it is and may share it."""
        own = self.own_fingerprint
        if own.lora_adapters == BASE or self.settings.lora == "refuse":
            return own
        if own.digest not in self._leaves_kv:
            self._leaves_kv[own.digest] = adapters_leave_kv(self.engine)
        return replace(own, lora_adapters=BASE) if self._leaves_kv[own.digest] else own

    @property
    def adapters(self) -> str:
        """With which KV is computed now, where that may differ from page to page."""
        return "" if self.settings.lora == "refuse" else self.fingerprint.lora_adapters

    @property
    def runner(self) -> Runner:
        """What turns run on; for the host's own thread."""
        return self._runner

    @property
    def precision(self) -> Precision:
        """How pages are sealed, with what the preset leaves to a probe of the model settled."""
        _ = self.engine
        return self._precision

    def _settle_in(self, engine: Engine) -> None:
        s, p, shape = self.settings, self._precision, engine.shape
        self.residents = Residents(p, shape, average_bits=s.average_bits)
        if s.precision == JOINT and s.handoff and shape and not engine.refusal and engine.observer is None:
            engine.observer = Observer(engine.model, shape.layers, p)

    def precision_of(self, agent: Key) -> Precision:
        """How pages of this agent are sealed now."""
        if self.settings.precision != JOINT:
            return self.precision
        store = self.store
        return self.residents.precision(agent, store.budget_bytes - store.nbytes)

    @property
    def uniform_because(self) -> str:
        """Why all layers have one width although `joint` was asked for; "" if that is not so."""
        if self.settings.precision != JOINT or self._engine is None:
            return ""
        refusal = self._engine.refusal or (self._engine.observer.refusal if self._engine.observer else None)
        return refusal or self.residents.uniform_because

    def status(self) -> dict[str, Any]:
        """The agents that spoke last, their tokens and bytes, the widths of their next pages, what is stored, and the
        budget; see `status.describe`."""
        s = self.settings
        about = {"model": s.model, "precision": s.precision, "uniform_because": self.uniform_because}
        return status.describe(self.residents, self._store, s.budget_bytes, **about)

    def set_budget(self, budget_bytes: int) -> None:
        """Keep to another budget from now on; waits for queued turns. What is over it is dropped, least recently used
        first, and those agents read text again. Raises InvalidSetting for a negative one."""
        if budget_bytes < 0:
            raise InvalidSetting(f"budget_bytes must not be negative: {budget_bytes}")

        def change() -> None:
            self.store.resize(budget_bytes // (2 if self.engine.has_state else 1))
            self.residents.refresh()

        self._wait_for(change)

    @property
    def stored(self) -> SharedPageStore | None:
        """The pages, if any were stored yet."""
        return self._store

    @property
    def context_tokens(self) -> int:
        """That a prompt and its answer may take together."""
        return min(self.engine.context_tokens, self.settings.context_tokens or self.engine.context_tokens)

    @property
    def store(self) -> SharedPageStore:
        """Pages of the model as it is now; an emptied store when its weights were changed."""
        salt = hashlib.sha256(self.settings.salt.encode()).digest()
        found = self.fingerprint
        if self.settings.lora == "share_base" and not self.engine.has_state:
            found = replace(found, lora_adapters=BASE)
        root = hashlib.sha256(found.digest + salt).digest()
        if self._store is None or root != self._root:
            self._forget()
            pages_bytes, shape = self.settings.budget_bytes // (2 if self.engine.has_state else 1), self.engine.shape
            self._store, self._root = SharedPageStore(root, pages_bytes, shape.window if shape else None), root
        return self._store

    def projector_from(self, source: Fingerprint) -> Projector | None:
        """What makes that model's KV into this one's, if there is anything and the weights are what they were."""
        wanted = source.digest.hex(), self.own_fingerprint.digest.hex()
        return next((p for p in self._projectors if (p.source, p.target) == wanted), None)

    def _projector(self, path: str) -> Projector:
        assert self._engine is not None
        projector = projectors.load(path)
        if projector.target != self._engine.fingerprint.digest.hex():
            raise InvalidSetting(f"the projector {path} leads to another model than {self._engine.name}")
        return projector

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
        return self._queue(self._run, turn, on_text or (lambda _: None), stop.is_set)

    def export(
        self,
        turn: Turn,
        *,
        have: Iterable[bytes] = (),
        handoff: str = "",
        metadata: Mapping[str, str] | None = None,
        wider: bool = False,
    ) -> Package:
        """What another process needs to answer `turn` from KV, as far as it is stored here; waits for queued turns.

        have: content addresses that the receiver holds (`held` there); their pages stay here. handoff, metadata:
        free text that goes along. wider: in more bits than it is stored in (native if it is stored in 8), all of it, as
        long as the turn that computed it was the last one here. Raises PackageError when nothing is stored, KV of this
        model can't be moved, or nothing wider is left.
        """

        def work() -> Package:
            prompt = self.prompt(turn)
            return self._exchange.export(self, turn, prompt, frozenset(have), handoff, metadata or {}, wider)

        return self._wait_for(work)

    def adopt(self, package: Package, owners: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Take another process' pages, for `owners` (nobody by default), and what its members said; returns why not,
        if not; waits for queued turns. KV that does not say what its sender's said is not taken (`drift`)."""
        return self.take(package, owners).reasons

    def take(self, package: Package, owners: tuple[str, ...] = ()) -> Arrival:
        """As `adopt`; also how far off the KV was."""
        return self._wait_for(self._exchange.adopt, self, package, owners)

    def _began(self) -> None:
        self._thread = threading.get_ident()

    def _wait_for(self, work: Callable[..., T], *args: Any) -> T:
        if threading.get_ident() == self._thread:  # asked by the turn that runs
            return work(*args)
        return self._queue(work, *args).result()

    def _queue(self, work: Callable[..., T], *args: Any) -> "Future[T]":
        if os.getpid() != self._pid:
            raise HostClosed("this host was opened before the process forked; open one in the child")
        future = _Queued[T](self._thread_id)
        try:
            self._worker.submit(self._begin, future, work, *args)
        except RuntimeError as error:
            raise HostClosed(f"the host of {self.settings.model} is closed") from error
        return future

    def _begin(self, future: "_Queued[T]", work: Callable[..., T], *args: Any) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._looked_at = None
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)
            del future  # else the error's frames hold it, and it holds them

    def _thread_id(self) -> int:
        return self._thread

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
            repeat_instruction_tokens=self.settings.repeat_instruction_tokens,
            view=turn.view,
        )

    def close(self) -> None:
        """Let the running turn end, refuse queued and further ones with HostClosed, free the model and all pages.

        Called by a callback of that turn, it returns at once, and all but the refusing happens when the turn has ended.
        """
        self._closed = True
        if os.getpid() != self._pid:  # a child's copy; threads, files and connections are the parent's
            self._engine = self._store = None
        elif threading.get_ident() == self._thread:
            threading.Thread(target=self._shut, name="qkvshare-close").start()
        else:
            self._shut()

    def _shut(self) -> None:
        self._worker.shutdown(wait=True)
        self._notice.withdraw()
        self._forget()
        self._engine = self._store = None
        self._runner = Runner(self)

    def _forget(self) -> None:
        if self._store:
            self._store.clear()
        self.snapshots.clear()
        self.canaries.clear()

    def _run(self, turn: Turn, on_text: Callable[[str], None], cancelled: Callable[[], bool]) -> Answer:
        if cancelled():
            raise Cancelled("the turn was cancelled before it began")
        if self._closed:
            raise HostClosed(f"the host of {self.settings.model} was closed before this turn began")
        try:
            return self._answer(turn, on_text, cancelled)
        finally:
            self._notice.changed()

    def _answer(self, turn: Turn, on_text: Callable[[str], None], cancelled: Callable[[], bool]) -> Answer:
        return self._runner.answer(turn, on_text, cancelled)
