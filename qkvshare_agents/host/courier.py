"""Sends a conversation's KV to another process and receives it there: host and transport, within a deadline.

What can't be moved is no error: the next turn reads the text, and its report says why. `send` and `receive` measure
how long moving takes, and `send` leaves KV where it is when reading the text again is faster.
"""

import logging
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from qkvshare_agents.errors import InvalidSetting, PackageError, TransportError, printable
from qkvshare_agents.host.host import Host
from qkvshare_agents.transport.interface import DEADLINE_MS, LIFETIME_MS, Transport, TurnDeadline, check_deadline
from qkvshare_agents.turns.plan import slower_than_text
from qkvshare_agents.turns.report import Arrival
from qkvshare_agents.turns.request import Turn
from qkvshare_agents.wire import package
from qkvshare_agents.wire.package import Package
from qkvshare_agents.wire.payload import Payload

_log = logging.getLogger("qkvshare_agents")
_KEPT = 16  # measurements
_HELD_BACK = 20  # packages that text was faster for; then one is moved to measure again
_LEAST_PREFILL_TOKENS = 64  # below that, a turn's time says little about reading


@dataclass(frozen=True)
class Sent:
    """key: what to tell the receiver; "" if nothing was sent. reasons: why not. held_back: because reading the text is
    faster. ms, moved_bytes: of the publishing."""

    key: str
    reasons: tuple[str, ...] = ()
    ms: float = 0.0
    moved_bytes: int = 0
    held_back: bool = False


class Courier:
    """host, transport: whose KV, and over what. deadline_ms: of all that one `send` or
    `receive` does on the transport, or of a `TurnDeadline` that is passed.

    Raises InvalidSetting for a transport that others can reach when the host has no secret: without one, whoever
    can write there can put KV and words into the conversation.
    """

    def __init__(
        self, host: Host, transport: Transport, *, deadline_ms: float = DEADLINE_MS, lifetime_ms: int = LIFETIME_MS
    ) -> None:
        if transport.crosses_machines and not host.settings.secret:
            raise InvalidSetting(
                f"packages over {transport.name} must be signed: set HostSettings(secret=...) or QKVSHARE_SECRET to "
                "the same random text on both sides (python -c 'import secrets; print(secrets.token_hex(32))')"
            )
        self._host, self._transport = host, transport
        self._deadline_ms, self._lifetime_ms = check_deadline(deadline_ms), lifetime_ms
        self._speeds: deque[tuple[int, float]] = deque(maxlen=_KEPT)  # (bytes, ms) of whole moves, either way
        self._held_back = 0  # packages in a row
        self._warned = False

    def send(
        self,
        turn: Turn,
        *,
        have: Iterable[bytes] = (),
        handoff: str = "",
        metadata: Mapping[str, str] | None = None,
        wider: bool = False,
    ) -> Sent:
        """Publish what is stored of `turn`'s prompt, so that another process can answer it; see `Host.export`."""
        try:
            out = self._host.export(turn, have=have, handoff=handoff, metadata=metadata, wider=wider)
        except PackageError as error:
            return Sent("", (self._failed("sent", error),))
        return self.post(out, secrets.token_hex(16))

    def post(self, out: Package, key: str, deadline: TurnDeadline | None = None) -> Sent:
        """Publish a package under a key that is not in use."""
        deadline = deadline or self._deadline()
        if reason := self.slower_than_text(out):
            return Sent("", (reason,), held_back=True)
        try:
            started = time.perf_counter()
            payload = out.write(secret=self._host.settings.secret)
            deadline.run(lambda ms: self._transport.put(key, payload, deadline_ms=ms, lifetime_ms=self._lifetime_ms))
        except (PackageError, TransportError) as error:
            return Sent("", (self._failed("sent", error),))
        return Sent(key, (), self._measured(payload, started), payload.nbytes)

    def receive(
        self, key: str, *, keep: bool = False, ask: Callable[[], str] | None = None, scope: str = ""
    ) -> Arrival:
        """Fetch, check and store; give the result to the turn (`Turn.arrival`). keep: leave it for other readers.

        ask: gets wider pages from the sender and returns their key, in whatever way the processes talk; used when the
        KV does not say what the sender's said. There, it is `send(turn, wider=True).key`. A package of which nothing
        came in ("" as the key, too) is one reason more in the turn's report. scope: of the turns that go on with it
        (`Turn.scope`): what members said is spelt as it came in these only.
        """
        return self._receive(key, keep, ask, scope, self._deadline())

    def _receive(
        self, key: str, keep: bool, ask: Callable[[], str] | None, scope: str, deadline: TurnDeadline
    ) -> Arrival:
        if not key:
            return Arrival(("the sender sent no KV",))
        came, arrival = self.fetch(key, deadline)
        if came is None:
            return arrival
        taken = self._host.take(came, scope=scope)  # may wait for a turn, which is not in `transfer_ms`
        if not keep:
            with suppress(TransportError):  # then it goes when it expires
                deadline.run(lambda ms: self._transport.delete(key, deadline_ms=ms))
        arrival = replace(taken, transfer_ms=arrival.transfer_ms, moved_bytes=arrival.moved_bytes)
        if not arrival.alarmed or ask is None:
            return arrival
        try:
            again = self._receive(ask(), False, None, scope, deadline)
        except Exception as error:  # of the application's own way of talking
            again = Arrival((f"the sender could not be asked for wider pages: {type(error).__name__}",), alarmed=True)
        return replace(
            again,
            reasons=(*arrival.reasons, *(again.reasons or ("wider pages were asked for and used",))),
            transfer_ms=arrival.transfer_ms + again.transfer_ms,
            moved_bytes=arrival.moved_bytes + again.moved_bytes,
            canary_ms=arrival.canary_ms + again.canary_ms,
        )

    def fetch(self, key: str, deadline: TurnDeadline | None = None) -> tuple[Package | None, Arrival]:
        """The package under a key, checked and not stored yet; None with the reason if there is none to use."""
        deadline = deadline or self._deadline()
        started = time.perf_counter()
        try:
            payload = deadline.run(lambda ms: self._transport.get(key, deadline_ms=ms))
            came = package.read(payload, secret=self._host.settings.secret)
        except (PackageError, TransportError, InvalidSetting) as error:  # also a key that is none
            return None, Arrival((self._failed("received", error),), _ms_since(started))
        return came, Arrival((), self._measured(payload, started), payload.nbytes)

    def slower_than_text(self, out: Package) -> str | None:
        """The planner's verdict on moving `out`, once both speeds were measured here; None: move it.

        Now and then it is None all the same, so that a transport that became faster is noticed.
        """
        if not self._speeds or (pace := _prefill_ms_per_token(self._host)) is None:
            return None
        # publishing and reading are about equal, and the slope says more than the offset does for large ones
        ms_per_byte = statistics.median(ms / nbytes for nbytes, ms in self._speeds)
        reason = slower_than_text(2 * ms_per_byte * out.kv_bytes, pace * out.covered_tokens)
        self._held_back = self._held_back + 1 if reason else 0
        if self._held_back > _HELD_BACK:
            self._speeds.clear()
            self._held_back, reason = 0, None
        return reason

    def _deadline(self) -> TurnDeadline:
        return TurnDeadline(self._deadline_ms)

    def _measured(self, payload: Payload, started: float) -> float:
        ms = _ms_since(started)
        self._speeds.append((payload.nbytes, ms))
        return ms

    def _failed(self, what: str, error: Exception) -> str:
        reason = f"KV could not be {what} over {self._transport.name}: {printable(str(error))}"
        if not self._warned:
            _log.warning("%s; turns read the text again until it works (said once)", reason)
            self._warned = True
        return reason


def _prefill_ms_per_token(host: Host) -> float | None:
    """How fast this model reads, from the turns it answered; None before one read enough."""
    paces = [
        (report.first_token_ms - report.import_ms) / report.prefilled_tokens
        for report in list(host.reports)
        if report.prefilled_tokens >= _LEAST_PREFILL_TOKENS
    ]
    return statistics.median(paces[-_KEPT:]) if paces else None


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
