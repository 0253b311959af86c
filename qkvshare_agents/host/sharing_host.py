"""A host whose conversations go on in other processes: what it computes it publishes, and what it lacks it looks for.

Nobody has to pass keys along. A package lies under a hash of (model and salt, the conversation's text up to an answer),
and every process that is to answer next can say that text. The key only finds a package; whether its KV is used is
decided on token ids, as always.
"""

import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from qkvshare_agents.errors import InvalidSetting, PackageError, TransportError, printable
from qkvshare_agents.host.courier import Courier
from qkvshare_agents.host.host import Host, Loaded
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message, Prompt, answered
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.store.shared_store import bare_key
from qkvshare_agents.transport.interface import DEADLINE_MS, Transport, TurnDeadline
from qkvshare_agents.transport.shm import ShmTransport
from qkvshare_agents.turns.report import Arrival
from qkvshare_agents.turns.request import Answer, Turn
from qkvshare_agents.wire.package import Package

_log = logging.getLogger("qkvshare_agents")
_MOST_PARTS = 32  # packages that a newer one may build on; then all pages travel again
_REMEMBERED = 20_000  # packages, and pages of packages
_PAUSE_S = 10.0  # after a failure; turns in between do not wait for a store that is down
_PARTS, _OWNERS = "parts", "owners"  # in a package's metadata


class _Holders(Collection[bytes]):
    """Pages that published packages hold, by content address, until a while before these expire."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def note(self, address: bytes, key: str, until: float) -> None:
        """The package under `key` holds the page; until: monotonic seconds."""
        self._known[address] = key, until
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def key(self, address: bytes) -> str:
        """Of the package with that page; "" if there is none."""
        key, until = self._known.get(address, ("", 0.0))
        return key if until > time.monotonic() else ""

    def __contains__(self, address: object) -> bool:
        return isinstance(address, bytes) and bool(self.key(address))

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def open_transport(address: str) -> Transport:
    """The transport at `shm` (this user's shared memory), `redis://...` or `rediss://...`. Raises InvalidSetting."""
    if address == "shm":
        return ShmTransport()
    if address.startswith(("redis://", "rediss://")):
        from qkvshare_agents.transport.redis import RedisTransport

        return RedisTransport(address)
    raise InvalidSetting("share (QKVSHARE_SHARE) must be shm, redis://... or rediss://...")


class SharingHost(Host):
    """A Host on a transport. What can't be moved is no error: the turn reads the text, and its report says why.

    An answer is published before it is returned, so that whoever hears of it finds its KV. Raises InvalidSetting for a
    transport that others can reach when there is no secret. A transport that can't be opened now is tried again later.
    deadline_ms: of all that one turn moves; after a failure nothing is moved for a while.
    """

    deadline_ms = DEADLINE_MS

    def __init__(self, settings: HostSettings, engine: Engine | None = None) -> None:
        super().__init__(settings, engine)
        self._refusal = ""  # why there is no transport, if so
        self._transport: Transport | None = None
        self._courier: Courier | None = None
        self._holders = _Holders()
        self._known: OrderedDict[str, None] = OrderedDict()  # keys of packages that this process made or took
        self._paused_until = 0.0
        self._open()

    def _shut(self) -> None:
        super()._shut()
        if self._transport:
            self._transport.close()

    def _open(self) -> None:
        try:
            self._transport = open_transport(self.settings.share)
        except TransportError as error:  # somebody else's directory in its place, say
            known, self._refusal = self._refusal, f"KV is not shared with other processes: {error}"
            if not known:
                _log.warning("%s; turns read the text until it can be opened (said once)", self._refusal)
            self._pause()
            return
        self._courier = Courier(self, self._transport, deadline_ms=self.deadline_ms)

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + _PAUSE_S

    @property
    def _paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def _answer(
        self,
        loaded: Loaded,
        turn: Turn,
        on_text: Callable[[str], None],
        cancelled: Callable[[], bool],
        spent_ms: float,
    ) -> Answer:
        deadline, prompt = TurnDeadline(self.deadline_ms), loaded.space.prompt(turn)
        turn = replace(turn, arrival=self._look_for(loaded, turn, prompt, deadline))
        if turn.arrival.moved_bytes:
            prompt = loaded.space.prompt(turn)  # members of it said something in ids that were not known
        answer = loaded.runner.answer(turn, on_text, cancelled, prompt=prompt, spent_ms=spent_ms)
        if not answer.calls:  # calls and their results stay with their agent, and so with this process
            self._publish(loaded, turn, prompt, answer, deadline)
        return answer

    def _look_for(self, loaded: Loaded, turn: Turn, prompt: Prompt, deadline: TurnDeadline) -> Arrival:
        """Take over what another process published of this conversation, unless it is here."""
        settled = _settled(prompt)
        key = self._key(settled)
        if not settled or key in self._known:
            return turn.arrival
        if not self._courier and not self._paused:
            self._open()
        if not self._courier or not self._transport:
            return Arrival((self._refusal,))
        if self._paused:
            return Arrival((f"{self._transport.name} failed moments ago, so KV of other processes is not looked for",))
        transport = self._transport
        try:
            if deadline.run(lambda ms: transport.missing([key], deadline_ms=ms)):
                return turn.arrival
        except TransportError as error:
            self._pause()
            return Arrival(
                (f"KV of other processes was not looked for over {transport.name}: {printable(str(error))}",)
            )
        arrival = self._take_over(loaded, turn, self._with_parts(self._courier, key, deadline))
        if deadline.failed:
            self._pause()
        return arrival

    def _take_over(self, loaded: Loaded, turn: Turn, found: Iterable[tuple[Package | None, Arrival]]) -> Arrival:
        ms, nbytes, taken, alarms = 0.0, 0, Arrival(), tuple[str, ...]()
        for package, arrival in found:
            ms, nbytes = ms + arrival.transfer_ms, nbytes + arrival.moved_bytes
            spent, taken = taken.canary_ms, arrival
            if package:
                owners = self._owners(turn, package)
                hidden = turn.access.readers is not None and not owners
                taken = Arrival((turn.access.reason,)) if hidden else loaded.exchange.adopt(package, owners, turn.scope)
            taken = replace(taken, canary_ms=taken.canary_ms + spent)
            alarms += taken.reasons if taken.alarmed else ()
        reasons = tuple(dict.fromkeys((*alarms, *taken.reasons)))
        return replace(taken, reasons=reasons, transfer_ms=ms, moved_bytes=nbytes, alarmed=bool(alarms))

    def _with_parts(
        self, courier: Courier, key: str, deadline: TurnDeadline
    ) -> Iterator[tuple[Package | None, Arrival]]:
        """The package under `key`, behind those that hold pages which it leaves out and which are not here. It ends
        with the first one that the transport fails to bring."""
        package, arrival = courier.fetch(key, deadline)
        if package:
            lacking = self.store.lacks(package.ids, package.steps)
            parts = package.metadata.get(_PARTS, "").split()[:_MOST_PARTS] if lacking else []
            for part in (p for p in parts if p != key and p not in self._known):
                yield courier.fetch(part, deadline)
                if deadline.failed:
                    return
                self._remember(part, None)
            self._remember(key, package)
        yield package, arrival

    def _publish(self, loaded: Loaded, turn: Turn, prompt: Prompt, answer: Answer, deadline: TurnDeadline) -> None:
        said = Message("assistant", answer.text, turn.speaker.name if turn.speaker.label else "")
        following = replace(turn, messages=(*turn.messages, said))
        prompt = answered(prompt, said, self.engine.template, self.ledger.within(turn.scope))
        key = self._key(prompt.ids)
        known = key in self._known
        self._remember(key, None)  # what was said here is not looked for elsewhere
        courier, transport = self._courier, self._transport
        if known or self._paused or not courier or not transport:
            return
        try:
            package = loaded.exchange.export(following, prompt, self._holders, "", {}, False)
            left_out = (step.key for step in package.steps if step.page is None)
            parts = list(dict.fromkeys(self._holders.key(a) or self._holders.key(bare_key(a)) for a in left_out))
            if len(parts) > _MOST_PARTS or "" in parts:
                package, parts = loaded.exchange.export(following, prompt, (), "", {}, False), []
        except PackageError:
            return  # nothing is stored of it, or KV of this model can't be moved: the turn's report said so
        owners = " ".join(self._named(owner) for owner in turn.access.owners)
        package = replace(package, metadata={_PARTS: " ".join(parts), _OWNERS: owners})
        try:
            # else another process came to the same answer
            new = bool(deadline.run(lambda ms: transport.missing([key], deadline_ms=ms)))
        except TransportError:
            new = True
        if new and not (sent := courier.post(package, key, deadline)).key:
            if not sent.held_back:
                self._pause()
            return
        self._remember(key, package)

    def _remember(self, key: str, package: Package | None) -> None:
        self._known[key] = None
        if package:
            until = time.monotonic() + (package.expires_ms / 1000 - time.time()) / 2
            layers = self.store.window.layers if self.store.window else frozenset()
            for step in package.steps:
                if step.sealed and step.page is not None:
                    address = step.key if step.page.holds(layers) else bare_key(step.key)
                    self._holders.note(address, key, until)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _key(self, settled: Sequence[int]) -> str:
        """A name for what was said so far; the same text has other ids where it was not generated."""
        text = self.engine.template.encoder.decode(settled)  # a special token in an answer is not in its text
        return hmac.new(self.settings.secret.encode(), self.store.root_key + text.encode(), "sha256").hexdigest()

    def _named(self, owner: str) -> str:
        return hmac.new(self.settings.secret.encode(), self.store.root_key + owner.encode(), "sha256").hexdigest()[:32]

    def _owners(self, turn: Turn, package: Package) -> tuple[str, ...]:
        """Those of the package's owners whose pages `turn` may read."""
        names = package.metadata.get(_OWNERS, "").split()
        return tuple(owner for owner in turn.access.readers or () if self._named(owner) in names)


def _settled(prompt: Prompt) -> tuple[int, ...]:
    return prompt.ids[: max((end for end, _ in prompt.answers), default=0)]
