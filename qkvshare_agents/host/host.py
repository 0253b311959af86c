"""One loaded model, one page store, many agents.

Turns run one at a time on the host's own thread, in the order they came. Callers may live in any thread or
event loop; cancelling stops the decode loop between two tokens and leaves the store as it was.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from qkvshare_agents.budget.agents import Residents
from qkvshare_agents.context.composer import Composer
from qkvshare_agents.errors import Cancelled, HostBusy, HostClosed, InvalidSetting
from qkvshare_agents.exchange.packages import Exchange
from qkvshare_agents.host import status
from qkvshare_agents.host.status import Notice
from qkvshare_agents.kv.page import Precision
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.fingerprint import Fingerprint
from qkvshare_agents.prompt.layout import Prompt
from qkvshare_agents.prompt.ledger import Ledger
from qkvshare_agents.prompt.members import Roster
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.store.shared_store import SharedPageStore
from qkvshare_agents.turns.pipeline import Runner
from qkvshare_agents.turns.report import Arrival, HandoffReport
from qkvshare_agents.turns.request import Answer, Turn
from qkvshare_agents.turns.working import Working
from qkvshare_agents.turns.workspace import Workspace
from qkvshare_agents.wire.package import Package

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
        self.ledger = Ledger()
        self.roster = Roster()
        self.reports: deque[HandoffReport] = deque(maxlen=_KEPT_REPORTS)
        self._engine = engine  # as it was given; `load` brings one otherwise
        self._loaded: Loaded | None = None
        self._loading = threading.Lock()
        self._notice = Notice(self.status)
        self._thread = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="qkvshare-host", initializer=self._began)
        self._pid = os.getpid()
        self._closed = False

    def load(self) -> Workspace:
        """Load the model, unless it is loaded, and find out what it can do; returns the state that turns share."""
        return self._load().space

    def _load(self) -> "Loaded":
        with self._loading:
            if self._loaded is None:
                if self._closed:
                    raise HostClosed(f"the host of {self.settings.model} is closed")
                self._engine = self._engine or _engine(self.settings)
                self._loaded = self._set_up(self._engine)
            return self._loaded

    def _set_up(self, engine: Engine) -> "Loaded":
        return Loaded.of(Workspace(self.settings, engine, ledger=self.ledger, roster=self.roster, reports=self.reports))

    @property
    def engine(self) -> Engine:
        """The loaded model. This and the properties below load it if need be (`load`)."""
        return self.load().engine

    @property
    def store(self) -> SharedPageStore:
        """Pages of the model as the last turn found it."""
        return self.load().store

    @property
    def fingerprint(self) -> Fingerprint:
        """Of what computes KV, as the last turn found it."""
        return self.load().fingerprint

    @property
    def precision(self) -> Precision:
        """How pages are sealed, with what the preset leaves to a probe of the model settled."""
        return self.load().precision

    @property
    def residents(self) -> Residents:
        """The agents that spoke last, and how wide their next pages become."""
        return self.load().residents

    @property
    def context_tokens(self) -> int:
        """That a prompt and its answer may take together."""
        return self.load().context_tokens

    def prompt(self, turn: Turn) -> Prompt:
        """The exact tokens that `turn` would be answered from now."""
        return self.load().prompt(turn)

    def status(self) -> dict[str, Any]:
        """The agents that spoke last, their tokens and bytes, the widths of their next pages, what is stored, and the
        budget; see `status.describe`. Loads nothing."""
        s, space = self.settings, self._loaded.space if self._loaded else None
        about = {
            "model": s.model,
            "precision": s.precision,
            "uniform_because": space.uniform_because if space else "",
        }
        residents = space.residents if space else Residents(s.base_precision, None)
        return status.describe(residents, space.store if space else None, s.budget_bytes, **about)

    def set_budget(self, budget_bytes: int) -> None:
        """Keep to another budget from now on; waits for queued turns. What is over it is dropped, least recently used
        first, and those agents read text again. Raises InvalidSetting for a negative one."""
        if budget_bytes < 0:
            raise InvalidSetting(f"budget_bytes must not be negative: {budget_bytes}")

        def change() -> None:
            self.load().resize(budget_bytes)

        self._wait_for(change)

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
            loaded = self._refreshed()
            prompt = loaded.space.prompt(turn)
            return loaded.exchange.export(turn, prompt, frozenset(have), handoff, metadata or {}, wider)

        return self._wait_for(work)

    def adopt(self, package: Package, owners: tuple[str, ...] = (), scope: str = "") -> tuple[str, ...]:
        """Take another process' pages, for `owners` (nobody by default), and what its members said, for turns of
        `scope`; returns why not, if not; waits for queued turns. KV that does not say what its sender's said is not
        taken (`drift`), and neither are its words."""
        return self.take(package, owners, scope).reasons

    def take(self, package: Package, owners: tuple[str, ...] = (), scope: str = "") -> Arrival:
        """As `adopt`; also how far off the KV was."""
        return self._wait_for(lambda: self._refreshed().exchange.adopt(package, owners, scope))

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

    def _refreshed(self) -> "Loaded":
        """The loaded model after a look at its weights, once for all that is done without a pause."""
        loaded = self._load()
        loaded.space.refresh()
        return loaded

    def _begin(self, future: "_Queued[T]", work: Callable[..., T], *args: Any) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)
            del future  # else the error's frames hold it, and it holds them

    def _thread_id(self) -> int:
        return self._thread

    def close(self) -> None:
        """Let the running turn end, refuse queued and further ones with HostClosed, free the model and all pages.

        Called by a callback of that turn, it returns at once, and all but the refusing happens when the turn has ended.
        """
        self._closed = True
        if os.getpid() != self._pid:  # a child's copy; threads, files and connections are the parent's
            self._engine = self._loaded = None
        elif threading.get_ident() == self._thread:
            threading.Thread(target=self._shut, name="qkvshare-close").start()
        else:
            self._shut()

    def _shut(self) -> None:
        self._worker.shutdown(wait=True)
        self._notice.withdraw()
        if self._loaded:
            self._loaded.space.forget()
        self._engine = self._loaded = None

    def _run(self, turn: Turn, on_text: Callable[[str], None], cancelled: Callable[[], bool]) -> Answer:
        if cancelled():
            raise Cancelled("the turn was cancelled before it began")
        if self._closed:
            raise HostClosed(f"the host of {self.settings.model} was closed before this turn began")
        loaded, started = self._load(), time.perf_counter()
        loaded.space.refresh()
        spent_ms = (time.perf_counter() - started) * 1000
        try:
            return self._answer(loaded, turn, on_text, cancelled, spent_ms)
        finally:
            self._notice.changed()

    def _answer(
        self,
        loaded: "Loaded",
        turn: Turn,
        on_text: Callable[[str], None],
        cancelled: Callable[[], bool],
        spent_ms: float,
    ) -> Answer:
        return loaded.runner.answer(turn, on_text, cancelled, spent_ms=spent_ms)


@dataclass(frozen=True)
class Loaded:
    """What a host runs once its model is loaded."""

    space: Workspace
    runner: Runner
    exchange: Exchange

    @classmethod
    def of(cls, space: Workspace, runner: type[Runner] = Runner) -> "Loaded":
        working, composer = Working(space), Composer(space)
        return cls(space, runner(space, working, composer), Exchange(space, working, composer))


def _engine(s: HostSettings) -> Engine:
    return Engine.load(
        s.model,
        dtype=s.dtype,
        device=s.device,
        device_map=s.device_map,
        offload_folder=s.offload_folder,
        attn_implementation=s.attn_implementation,
        thinking=s.thinking,
    )
