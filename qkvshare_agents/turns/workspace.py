"""A loaded model, and the state that its turns share.

Everything that a turn needs beside itself: the engine, what is stored, what members said and who they are. Nothing
here waits, queues or locks out others: that is the host's part. Attributes are what they are when they are read;
`refresh` looks at the weights, once for each turn.
"""

import hashlib
from collections import deque
from dataclasses import replace

from qkvshare_agents.budget.agents import Key, Residents
from qkvshare_agents.budget.observer import Observer
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.kv.codec import prepare
from qkvshare_agents.kv.page import Precision
from qkvshare_agents.model import decoding, rope
from qkvshare_agents.model import projector as projectors
from qkvshare_agents.model.adapters import BASE
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.fingerprint import Fingerprint
from qkvshare_agents.model.key_calibration import settle
from qkvshare_agents.model.lora import adapters_leave_kv
from qkvshare_agents.model.projector import Projector
from qkvshare_agents.model.rope import Rotary
from qkvshare_agents.prompt.layout import Prompt, lay_out
from qkvshare_agents.prompt.ledger import Ledger
from qkvshare_agents.prompt.members import Roster
from qkvshare_agents.settings import JOINT, HostSettings
from qkvshare_agents.store.canaries import Canaries
from qkvshare_agents.store.shared_store import SharedPageStore
from qkvshare_agents.store.state_store import SnapshotStore
from qkvshare_agents.turns.report import HandoffReport
from qkvshare_agents.turns.request import Turn

_KEPT_VERDICTS = 64  # on adapters


class Workspace:
    """Of one engine. Used on the host's thread; whoever reads it elsewhere sees what the last turn left.

    reports: where turns say what they cost. fingerprint: of what computes KV: the model's own, or the base's alone
    where adapters leave its KV as it is and may share it. adapters: with which KV is computed, where that may differ
    from page to page. store: pages of that fingerprint. refusal: why KV of this model can't be handed over, or None.
    Raises InvalidSetting for settings that the model rules out.
    """

    def __init__(
        self,
        settings: HostSettings,
        engine: Engine,
        *,
        ledger: Ledger,
        roster: Roster,
        reports: deque[HandoffReport],
    ) -> None:
        self.settings, self.engine = settings, engine
        self.ledger, self.roster, self.reports = ledger, roster, reports
        self.decode = decoding.chosen(settings.decoding, engine)
        self.own_fingerprint = engine.fingerprint
        self.precision, self.rotary = settings.base_precision, Rotary(refusal="handoff is switched off (handoff=False)")
        if settings.handoff:
            for device in engine.devices:
                prepare(device)
            self.precision = settle(self.precision, engine)
            self.rotary = rope.of_stored(engine)
        self.residents = Residents(self.precision, engine.shape, average_bits=settings.average_bits)
        self.refusal = _refusal(settings, engine)
        if settings.precision == JOINT and not self.refusal and engine.shape and engine.observer is None:
            engine.observer = Observer(engine.model, engine.shape.layers, self.precision)
        self._projectors = [_load_projector(path, engine) for path in settings.projectors]
        self.snapshots, self.canaries = SnapshotStore(settings.budget_bytes // 2), Canaries()
        self._leaves_kv: dict[bytes, bool] = {}  # by fingerprint: whether its adapters change no KV
        self.fingerprint, self.adapters = self._fingerprint()
        self.store = self._empty_store()

    @property
    def context_tokens(self) -> int:
        """That a prompt and its answer may take together."""
        return min(self.engine.context_tokens, self.settings.context_tokens or self.engine.context_tokens)

    @property
    def speaks_plainly(self) -> bool:
        """Whether what the model says is what its KV's fingerprint stands for: no adapter changes the end alone."""
        return self.fingerprint == self.own_fingerprint

    @property
    def uniform_because(self) -> str:
        """Why all layers have one width although `joint` was asked for; "" if that is not so."""
        if self.settings.precision != JOINT:
            return ""
        refusal = self.engine.refusal or (self.engine.observer.refusal if self.engine.observer else None)
        return refusal or self.residents.uniform_because

    def refresh(self) -> None:
        """Look whether the model is what it was. If not, what is stored is of another one, and is forgotten."""
        found = self.engine.fingerprint
        if found == self.own_fingerprint:
            return
        self.own_fingerprint = found
        self.fingerprint, self.adapters = self._fingerprint()
        if self._root_key() != self.store.root_key:
            self.forget()
            self.store = self._empty_store()

    def forget(self) -> None:
        """Free all that was stored."""
        self.store.clear()
        self.snapshots.clear()
        self.canaries.clear()

    def resize(self, budget_bytes: int) -> None:
        """Keep to another budget from now on; what is over it is dropped, least recently used first."""
        self.store.resize(self._pages_bytes(budget_bytes))
        self.residents.refresh()

    def prompt(self, turn: Turn) -> Prompt:
        """The exact tokens that `turn` would be answered from now."""
        return lay_out(
            turn.messages,
            turn.speaker,
            self.roster.members(turn.scope),
            template=self.engine.template,
            ledger=self.ledger.within(turn.scope),
            layout=self.settings.layout,
            system=self.settings.system,
            repeat_instruction_tokens=self.settings.repeat_instruction_tokens,
            view=turn.view,
        )

    def precision_of(self, agent: Key) -> Precision:
        """How pages of this agent are sealed now."""
        if self.settings.precision != JOINT:
            return self.precision
        return self.residents.precision(agent, self.store.budget_bytes - self.store.nbytes)

    def projector_from(self, source: Fingerprint) -> Projector | None:
        """What makes that model's KV into this one's, if there is anything and the weights are what they were."""
        wanted = source.digest.hex(), self.own_fingerprint.digest.hex()
        return next((p for p in self._projectors if (p.source, p.target) == wanted), None)

    def _fingerprint(self) -> tuple[Fingerprint, str]:
        """(of what computes KV, its adapters): the base alone, where adapters leave its KV as it is."""
        own = self.own_fingerprint
        if self.settings.lora == "refuse":
            return own, ""
        if own.lora_adapters != BASE:
            if own.digest not in self._leaves_kv:
                self._leaves_kv[own.digest] = adapters_leave_kv(self.engine)
            if self._leaves_kv[own.digest]:
                own = replace(own, lora_adapters=BASE)
            if len(self._leaves_kv) > _KEPT_VERDICTS:
                del self._leaves_kv[next(iter(self._leaves_kv))]
        return own, own.lora_adapters

    def _root_key(self) -> bytes:
        found = self.fingerprint
        if self.settings.lora == "share_base" and not self.engine.has_state:
            found = replace(found, lora_adapters=BASE)
        return hashlib.sha256(found.digest + hashlib.sha256(self.settings.salt.encode()).digest()).digest()

    def _empty_store(self) -> SharedPageStore:
        shape = self.engine.shape
        budget = self._pages_bytes(self.settings.budget_bytes)
        return SharedPageStore(self._root_key(), budget, shape.window if shape else None)

    def _pages_bytes(self, budget_bytes: int) -> int:
        """Of the budget, what pages may take: half of it where recurrent state is kept beside them."""
        return budget_bytes // (2 if self.engine.has_state else 1)


def _refusal(settings: HostSettings, engine: Engine) -> str | None:
    if not settings.handoff:
        return "handoff is switched off (handoff=False)"
    return engine.refusal or (None if engine.shape else "the model's KV has no shape that can be stored")


def _load_projector(path: str, engine: Engine) -> Projector:
    projector = projectors.load(path)
    if projector.target != engine.fingerprint.digest.hex():
        raise InvalidSetting(f"the projector {path} leads to another model than {engine.name}")
    return projector
