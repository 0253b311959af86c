"""Between a host and other processes: what goes into a package, and what of a package may come in."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite

from qkvshare_agents.context.composer import Composer
from qkvshare_agents.errors import PackageError
from qkvshare_agents.exchange import projected
from qkvshare_agents.exchange.admission import Admitted, Entry, sound_words, unsound_words
from qkvshare_agents.kv.page import PRESETS, Page, keep_native, seal
from qkvshare_agents.kv.part import Part
from qkvshare_agents.kv.shape import KVShape, in_words, sizes
from qkvshare_agents.kv.state import Snapshot, difference, put_together, taken_apart
from qkvshare_agents.model.canary import Canary, canary_of, default_limit, divergence, rows_of, weakness
from qkvshare_agents.prompt.layout import Message, Prompt
from qkvshare_agents.prompt.ledger import Ledger, Words
from qkvshare_agents.store.prefix_tree import chained_key
from qkvshare_agents.store.runs import Step
from qkvshare_agents.turns.prefix import with_state
from qkvshare_agents.turns.report import Arrival
from qkvshare_agents.turns.request import Turn
from qkvshare_agents.turns.working import Working
from qkvshare_agents.turns.workspace import Workspace
from qkvshare_agents.wire.package import Package


class Exchange:
    """Makes and takes packages for one workspace, on the host's thread. Remembers which came in, so that none does
    twice."""

    def __init__(self, space: Workspace, working: Working, composer: Composer) -> None:
        self._space, self._working, self._composer = space, working, composer
        self._admitted = Admitted()
        self._like: Snapshot | None = None  # state of the host's model, whatever of

    def export(
        self,
        turn: Turn,
        prompt: Prompt,
        have: Collection[bytes],
        handoff: str,
        metadata: Mapping[str, str],
        wider: bool,
    ) -> Package:
        """What is stored of the turn's `prompt` before its newest user turn, and what members said in it."""
        space, working, engine = self._space, self._working, self._space.engine
        if refusal := space.refusal:
            raise PackageError(f"there is no KV to hand over: {refusal}")
        last = max((end for end, _ in prompt.answers), default=prompt.settled)
        settled = prompt.ids[: min(last, engine.context_tokens)]  # what lies beyond is computed behind a cut, if at all
        match, state = space.store.match(settled, turn.access.readers), None
        if not match.tokens:
            raise PackageError("there is no KV to hand over: nothing of this conversation is stored here")
        if engine.has_state:
            match, state = with_state(match, settled, space.snapshots)
            if not state:
                raise PackageError(
                    "there is no KV to hand over: the recurrent state behind it is no longer stored here"
                )
        if state and difference(taken_apart(state), self._state_like()):
            raise PackageError("the model's state grows with its tokens, and such state does not travel yet")
        if match.not_by(space.adapters):
            raise PackageError("KV that was computed with several LoRA adapters stays here")
        steps, covered = space.store.steps(match, have), settled[: match.tokens]
        runs, _ = space.store.lineup(covered, steps)
        canary, nats = _canary(space, working, covered, runs, state)
        if wider or not nats <= space.settings.coarse_limit:  # NaN, too
            steps = _widened(space, working, covered, max(page.hops for page, _ in runs), nats)
            wide = [(step.page, step.tokens) for step in steps if step.page]
            canary, _ = _canary(space, working, covered, wide, state)
        assert engine.shape is not None
        spoken = _spoken(prompt, turn.messages, space.ledger.within(turn.scope))
        ledger = tuple(sound_words(engine.template.encoder, settled, match.tokens, spoken))
        return Package(
            settled, steps, space.fingerprint, engine.shape.groups, ledger, handoff, metadata, canary=canary,
            state=taken_apart(state) if state else None,
        )  # fmt: skip

    def adopt(self, package: Package, owners: tuple[str, ...] = (), scope: str = "") -> Arrival:
        """Store what came, or say why not. Nothing is stored or learnt unless all of it fits and says what its sender's
        said."""
        space = self._space
        if reason := space.refusal or self._admitted.refusal(package, int(time.time() * 1000)):
            return Arrival((reason,))
        if projector := space.projector_from(package.fingerprint):
            heard = projected.adopt(space, self._composer, projector, package, owners)
        else:
            heard = self._store(package, owners)
        if not heard.reasons:
            self._admitted.note(package)
            _learn(space.ledger, scope, package)
        return heard

    def _store(self, package: Package, owners: tuple[str, ...]) -> Arrival:
        space, working, engine = self._space, self._working, self._space.engine
        if reason := _mismatch(space, package) or unsound_words(engine.template.encoder, package):
            return Arrival((reason,))
        assert engine.shape is not None
        try:
            state = put_together(package.state, self._state_like()) if package.state else None
        except PackageError as error:
            return Arrival((str(error),))
        steps = [_on(engine.shape, step) for step in package.steps]
        (runs, new), whole = space.store.lineup(package.ids, steps), package.covered_tokens
        came, settled = sum(tokens for _, tokens in runs), package.ids[:whole]
        if came < whole:
            return Arrival((f"only {came} of {whole} tokens came over: pages that the sender left out are not here",))
        news = new or (state and not space.snapshots.holds(settled))
        heard = _listen(space, working, package, runs, steps, state) if news else Arrival()
        if heard.reasons:
            return heard
        stored = space.store.graft(package.ids, steps, owners, space.adapters)
        if stored < whole:
            return replace(heard, reasons=(f"only {stored} of {whole} tokens that came over fit into budget_bytes",))
        if state and news:
            space.snapshots.keep(settled, state)
            if not space.snapshots.holds(settled):
                return replace(heard, reasons=("the recurrent state that came over does not fit into budget_bytes",))
        if package.canary and heard.canary_nats is not None:  # whoever forwards it compares with the first sender
            space.canaries.keep(settled, package.canary)
        return heard

    def _state_like(self) -> Snapshot:
        """Recurrent state as this model has it, behind one token."""
        if self._like is None:
            engine = self._space.engine
            run = engine.begin(None)
            engine.feed(run, [0])
            self._like = engine.snapshot(run)
        assert self._like is not None
        return self._like


def _learn(ledger: Ledger, scope: str, package: Package) -> None:
    for text, start, stop in package.ledger:
        if ledger.find(text, scope) is None:  # what was generated here is not overwritten
            ledger.record(text, package.ids[start:stop], scope)


def _mismatch(space: Workspace, package: Package) -> str | None:
    engine, shape = space.engine, space.engine.shape
    assert shape is not None
    if not package.covered_tokens:
        return "the package holds no KV"
    if differences := package.fingerprint.differences(space.fingerprint):
        return f"the package is of another model: {', '.join(differences)} differ"
    if sizes(package.groups) != sizes(shape.groups):
        return f"the package has KV of {in_words(package.groups)}, this model of {in_words(shape.groups)}"
    if engine.has_state and package.state is None:
        return "the package lacks the recurrent state that this model needs beside its KV"
    if package.state and not engine.has_state:
        return "the package has recurrent state, and this model has none"
    if package.state and package.state.tokens != package.covered_tokens:
        return f"the package's state is behind {package.state.tokens} tokens, its KV of {package.covered_tokens}"
    if lacking := _lacking(package, shape):
        return lacking
    vocabulary = engine.model.get_input_embeddings().num_embeddings
    if max(package.ids) >= vocabulary:
        return f"the package holds token id {max(package.ids)}; the model has {vocabulary}"
    if len(package.ids) > engine.context_tokens:
        return f"the package holds {len(package.ids)} tokens; the context has {engine.context_tokens}"
    if not space.store.fits(package.ids, package.steps):
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


def _canary(
    space: Workspace,
    working: Working,
    ids: tuple[int, ...],
    runs: Sequence[tuple[Page, int]],
    state: Snapshot | None,
) -> tuple[Canary | None, float]:
    """What is expected behind `runs`; how far, in nats, that is off what was expected behind the KV as it was computed.

    Attention's KV is cut and its last tokens are read again; behind state, which can't be cut, once more.
    """
    if space.settings.canary_limit == inf:
        return None, 0.0
    count = rows_of(len(ids), space.engine.context_tokens - len(ids) if state else None)
    if count < 1:
        raise PackageError("the context is full: there is no room behind the KV to compare it with its canary")
    logits = working.expected(runs, ids, count, state, apart=True)
    said = space.canaries.find(ids)
    if said is None and state and (native := working.expected_natively(ids, count, state)) is not None:
        said = canary_of(native)
    return canary_of(logits), divergence(said.last(count), logits) if said and said.tokens >= count else 0.0


def _widened(space: Workspace, working: Working, ids: tuple[int, ...], hops: int, nats: float) -> tuple[Step, ...]:
    """The KV of `ids` again, from the native cache that their turn left behind. Raises PackageError if it is gone."""
    kv, precision = working.native(ids), space.precision
    if kv is None or precision.is_native:
        why = "it is stored as it was computed" if kv else "another turn ran since"
        raise PackageError(f"KV that is {nats:.2g} nats off can't be had in more bits: {why}")
    widths = {bits for pair in precision.widths or ((precision.key_bits, precision.value_bits),) for bits in pair}
    narrow = any(bits and bits < 8 for bits in widths)
    wider = replace(precision, key_bits=8, value_bits=8, widths=None) if narrow else PRESETS["native"]
    steps: list[Step] = []
    key = space.store.root_key
    for start in range(0, len(ids), precision.page_size):
        part = ids[start : start + precision.page_size]
        key, full = chained_key(key, part), len(part) == precision.page_size
        span, window = kv.span(start, start + len(part)), space.store.window
        if window and not window.sees(start, start + len(part), (len(ids),)):
            span = span.without(window.layers)
        page = seal(span, wider, starts_sequence=start == 0) if full else keep_native(span)
        steps.append(Step(len(part), key, full, replace(page, hops=hops)))
    return tuple(steps)


def _listen(
    space: Workspace,
    working: Working,
    package: Package,
    runs: Sequence[tuple[Page, int]],
    steps: Sequence[Step],
    state: Snapshot | None,
) -> Arrival:
    """Whether the KV in `runs` says what its sender's said."""
    limit, canary, ids = space.settings.canary_limit, package.canary, package.ids[: package.covered_tokens]
    if limit == inf:
        return Arrival()
    if canary is None:
        return Arrival(("the package has no canary, and its KV is not used without one (canary_limit)",))
    rows = rows_of(len(ids), space.engine.context_tokens - len(ids) if state else None)
    vocabulary = space.engine.model.get_input_embeddings().num_embeddings
    if rows < 1:
        return Arrival(("the context is full: there is no room behind the KV to compare it with its canary",))
    if weak := weakness(canary, rows, vocabulary):
        return Arrival((weak,))
    started = time.perf_counter()
    nats = divergence(canary, working.expected(runs, ids, rows, state))
    ms = (time.perf_counter() - started) * 1000
    heard = Arrival((), canary_nats=nats if isfinite(nats) else None, canary_ms=ms)
    own = [page for (page, _), step in zip(runs, steps, strict=True) if page is not step.page]
    widths, engine = _widths(own) | {8} if own else (), space.engine  # own ones may be native, the sender's are not
    limit = limit or default_limit(engine.model.dtype, widths, noisy=engine.noisy)
    if nats <= limit:  # False for NaN
        return heard
    reason = (
        f"KV of another process is not used: it is {nats:.2g} nats off its canary (limit {limit:g}), so it is damaged, "
        "or of another position, text or model"
    )
    return replace(heard, reasons=(reason,), alarmed=True)


def _widths(pages: Sequence[Page]) -> set[int]:
    return {part.packed.bits for page in pages for part in page.parts if part.packed}


def _spoken(prompt: Prompt, messages: tuple[Message, ...], ledger: Words) -> tuple[Entry, ...]:
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


def _on(shape: KVShape, step: Step) -> Step:
    """The step with its page where the working cache has its layers."""
    page = step.page
    if page is None or not shape.groups or {place.type for place in shape.places} == {"cpu"}:
        return step
    keys, values = (
        tuple(moved for part in parts for moved in _placed(shape, part)) for parts in (page.keys, page.values)
    )
    return replace(step, page=replace(page, keys=keys, values=values))


def _placed(shape: KVShape, part: Part) -> Iterator[Part]:
    """A part for every device that has layers of it."""
    for place in dict.fromkeys(shape.places):
        here = {n for g, device in zip(shape.groups, shape.places, strict=True) if device == place for n in g.layers}
        rows = [row for row, layer in enumerate(part.layers) if layer in here]
        if rows:
            native = None if part.native is None else part.native[rows].to(place)
            packed = part.packed.rows(rows, place) if part.packed else None
            yield Part(tuple(part.layers[row] for row in rows), native, packed, part.balance)
