"""Between a host and other processes: what goes into a package, and what of a package may come in."""

import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, device

from qkvshare_agents.errors import PackageError
from qkvshare_agents.kv_cache import KVShape
from qkvshare_agents.ledger import Ledger
from qkvshare_agents.package import Package, Step
from qkvshare_agents.page import Part
from qkvshare_agents.span import in_words
from qkvshare_agents.transcript import Message, Prompt
from qkvshare_agents.turn import Turn

if TYPE_CHECKING:
    from qkvshare_agents.host import Host

_REMEMBERED = 10_000


class Exchange:
    """Makes and takes packages for one host, on its thread. Remembers which came in, so that none does twice."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, int] = OrderedDict()

    def export(
        self, host: "Host", turn: Turn, have: frozenset[bytes], handoff: str, metadata: Mapping[str, str]
    ) -> Package:
        """What is stored of `turn`'s prompt before its newest user turn, and what members said in it."""
        engine = host.engine
        if refusal := _refusal(host):
            raise PackageError(f"there is no KV to hand over: {refusal}")
        prompt = host.prompt(turn)
        settled = prompt.ids[: max((end for end, _ in prompt.answers), default=prompt.settled)]
        steps = host.store.steps(settled, have, turn.access.readers)
        if not steps:
            raise PackageError("there is no KV to hand over: nothing of this conversation is stored here")
        assert engine.shape is not None
        ledger = _spoken(prompt, turn.messages, host.ledger)
        return Package(settled, steps, engine.fingerprint, engine.shape.groups, ledger, handoff, metadata)

    def adopt(self, host: "Host", package: Package, owners: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Store what came; returns why not, in words for the report. Nothing is stored unless all of it fits."""
        engine = host.engine
        if reason := _refusal(host) or _mismatch(host, package) or self._repeated(package):
            return (reason,)
        assert engine.shape is not None
        for text, start, stop in package.ledger:
            if host.ledger.find(text) is None:  # what was generated here is not overwritten
                host.ledger.record(text, package.ids[start:stop])
        steps = [_on(engine.shape.device, step) for step in package.steps]
        stored = host.store.graft(package.ids, steps, owners)
        if stored < package.covered_tokens:
            return (
                f"only {stored} of {package.covered_tokens} tokens came over: pages that the sender left out, or that "
                "do not fit into budget_bytes, are not here",
            )
        return ()

    def _repeated(self, package: Package) -> str | None:
        now_ms = int(time.time() * 1000)
        while self._seen and (len(self._seen) >= _REMEMBERED or next(iter(self._seen.values())) < now_ms):
            self._seen.popitem(last=False)
        if package.id in self._seen:
            return "the package came in before; its pages are here, or were evicted since"
        self._seen[package.id] = package.expires_ms
        return None


def _refusal(host: "Host") -> str | None:
    if not host.settings.handoff:
        return "handoff is switched off (handoff=False)"
    if host.engine.has_state:
        return "the model has recurrent state, which does not travel between processes yet"
    return host.engine.refusal or (None if host.engine.shape else "the model's KV has no shape that can be stored")


def _mismatch(host: "Host", package: Package) -> str | None:
    engine, shape = host.engine, host.engine.shape
    assert shape is not None
    if differences := package.fingerprint.differences(engine.fingerprint):
        return f"the package is of another model: {', '.join(differences)} differ"
    if package.groups != shape.groups:
        return f"the package has KV of {in_words(package.groups)}, this model of {in_words(shape.groups)}"
    if lacking := _lacking(package, shape):
        return lacking
    vocabulary = engine.model.get_input_embeddings().num_embeddings
    if max(package.ids) >= vocabulary:
        return f"the package holds token id {max(package.ids)}; the model has {vocabulary}"
    if len(package.ids) > engine.context_tokens:
        return f"the package holds {len(package.ids)} tokens; the context has {engine.context_tokens}"
    if not host.store.fits(package.ids, package.steps):
        return "the package's addresses are not those of its token ids here: another salt (QKVSHARE_SALT)"
    return None


def _lacking(package: Package, shape: KVShape) -> str | None:
    """Why its pages are not all that is looked back at from behind them."""
    window, everything = shape.window, frozenset(range(shape.layers))
    stop = 0
    for step in package.steps:
        start, stop = stop, stop + step.tokens
        seen = window is None or window.sees(start, stop, (package.covered_tokens,))
        needed = everything if seen or window is None else everything - window.layers
        if step.page and not step.page.holds(needed):
            return f"the package's page of tokens {start} to {stop} lacks layers that look back at it"
    return None


def _spoken(prompt: Prompt, messages: tuple[Message, ...], ledger: Ledger) -> tuple[tuple[str, int, int], ...]:
    """(text, start, stop) of the answers in the prompt whose ids the ledger knows."""
    ends = {end for end, _ in prompt.answers}
    spoken: dict[str, tuple[str, int, int]] = {}
    for message in messages:
        ids = ledger.find(message.ledger_key)
        for end in ends if ids else ():
            assert ids is not None
            if prompt.ids[max(0, end - len(ids)) : end] == ids:
                spoken[message.ledger_key] = (message.ledger_key, end - len(ids), end)
    return tuple(spoken.values())


def _on(where: device, step: Step) -> Step:
    """The step with its page on the device of the working cache."""
    page = step.page
    if page is None or where.type == "cpu":
        return step
    keys, values = (tuple(_moved(part, where) for part in parts) for parts in (page.keys, page.values))
    return replace(step, page=replace(page, keys=keys, values=values))


def _moved(part: Part, where: device) -> Part:
    native, packed = part.native, part.packed
    if packed:
        minimum: Tensor | None = packed.minimum.to(where) if packed.minimum is not None else None
        packed = replace(packed, codes=packed.codes.to(where), scale=packed.scale.to(where), minimum=minimum)
    return Part(part.layers, None if native is None else native.to(where), packed)
