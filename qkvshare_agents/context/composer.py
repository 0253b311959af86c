"""Begins turns on KV that is put together: without what does not fit, with what was computed behind other prompts."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from qkvshare_agents import spans
from qkvshare_agents.context.attention_mass import Attended, AttentionMeter
from qkvshare_agents.context.fit import Fitted, fit
from qkvshare_agents.context.room import room_for
from qkvshare_agents.context.shortening import Shortened, Shortener
from qkvshare_agents.context.splice import SHORTEST, Segment, Sequence, Sequences
from qkvshare_agents.errors import Cancelled, ContextOverflow, QKVShareError
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.page import Page, keep_native, seal
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model import rope
from qkvshare_agents.prompt.layout import Prompt
from qkvshare_agents.store.assembly import Assemblies, Assembly, Piece, Source, bring
from qkvshare_agents.store.prefix_tree import NO_MATCH
from qkvshare_agents.turns.plan import Mode, Plan
from qkvshare_agents.turns.prefix import Start
from qkvshare_agents.turns.request import Turn
from qkvshare_agents.turns.workspace import Workspace


class Composer:
    """Of one workspace, on the host's thread. Remembers what was put together, as long as the store lives."""

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._made: Assemblies | None = None
        self._sequences = Sequences()
        self._attended = Attended()
        self._meter: AttentionMeter | None = None
        self._shortener = Shortener()

    @property
    def assemblies(self) -> Assemblies:
        self._forget_others()
        assert self._made is not None
        return self._made

    def _forget_others(self) -> None:
        """What was remembered of another store's KV: the model's weights were changed."""
        store = self._space.store
        if self._made is None or self._made.store is not store:
            self._made, self._sequences, self._attended = Assemblies(store), Sequences(), Attended()

    def fit(self, turn: Turn, prompt: Prompt, refusal: str | None) -> Fitted:
        """What `turn` continues from if that is not simply the longest stored prefix of its prompt.

        refusal: why KV can't be handed over. Raises ContextOverflow if the prompt does not fit and must not be changed.
        """
        space, context, readers = self._space, self._space.context_tokens, turn.access.readers
        if space.settings.fit == "error" and len(prompt.ids) >= context:
            who = turn.speaker.label or "an agent"
            raise ContextOverflow(
                f"context length exceeded: {len(prompt.ids)} tokens and one to come > {context} ({who})"
            )
        room, immovable = room_for(context, turn.sampling.max_tokens), refusal or space.rotary.refusal
        if space.settings.fit != "error" and room.lacks(len(prompt.ids)):
            short = self._shortener.shorten(turn, prompt, room, space.prompt, space.engine.template.encoder)
            assemblies, mass = (None if refusal else self.assemblies), None
            if assemblies and space.settings.fit == "drop_least_attended":
                mass = self._attended.of(short.prompt.ids, readers).tolist()
            fitted = fit(
                short.prompt, short.room, short.cuts, assemblies=assemblies, readers=readers, immovable=immovable,
                mass=mass,
            )  # fmt: skip
            return _told(fitted, short, len(prompt.ids) - len(short.prompt.ids))
        approximated = space.settings.splice or space.settings.projectors
        return self._approximated(prompt, turn) if approximated and not immovable else Fitted(prompt)

    def lay_in(self, ids: Ids, kv: KVCache, owners: tuple[str, ...], why: str) -> None:
        """Store KV of `ids` that is an approximation: prompts that begin with them continue from it, and say `why`."""
        assemblies, precision = self.assemblies, self._space.precision
        mark, behind = assemblies.mark(), assemblies.mark()
        path = tuple(i + mark for i in ids)

        def make_page(first: int, stop: int, sealed: bool) -> Page:
            span = kv.span(first, stop)
            page = seal(span, precision, starts_sequence=first == 0) if sealed else keep_native(span)
            return replace(page, hops=1)

        assemblies.store.extend(path, precision.page_size, len(path) - precision.residual_length, make_page, owners)
        assemblies.keep(Assembly(ids, (), (Piece(path, ((0, len(path)),)),), behind, why=why))

    def _approximated(self, prompt: Prompt, turn: Turn) -> Fitted:
        sources = [s for s in self.assemblies.sources(prompt.ids[:-1], turn.access.readers) if not s.assembly.dropped]
        best = max(sources, key=lambda source: source.tokens)
        if not best.assembly.mark:
            return Fitted(prompt)
        why = f"{best.assembly.why}: {best.tokens} tokens of KV that is an approximation"
        return Fitted(prompt, source=best, assembly=best.assembly, reasons=(why,))

    def assemble(self, fitted: Fitted, turn: Turn, kv: KVCache) -> Start:
        """Put the pieces that the turn continues from into the empty `kv`, and move their keys."""
        source, importing = fitted.source, time.perf_counter()
        assert source is not None
        store = self._space.store
        positions, pages = bring(store, source.pieces, kv, turn.access.readers)
        if len(positions) != source.tokens:
            raise QKVShareError(f"only {len(positions)} of {source.tokens} tokens of stored KV are left")
        rope.move(self._space.rotary, kv, positions)
        return Start(
            self._space.engine.begin(kv), Plan(Mode.PARTIAL, kv.tokens, ()), NO_MATCH, store, turn.access.owners,
            (time.perf_counter() - importing) * 1000, assembly=fitted.assembly, covered=source.covered,
            pages=tuple(pages), hops=max((page.hops for page in pages), default=0) + 1,
        )  # fmt: skip

    def splice(self, start: Start, prompt: Prompt, turn: Turn, cancelled: Callable[[], bool]) -> Start:
        """`start`, or what it becomes when the longest text that is known from another prompt is put in."""
        settings, kv, store = self._space.settings, start.run.kv, start.store
        if not settings.splice or kv is None or store is None or self._space.rotary.refusal:
            return start
        found = self._sequences.longest(prompt.ids[:-1], start.covered, turn.access.readers)
        again = settings.recompute_tokens
        if found is None or found.tokens < again + SHORTEST:
            return start
        piece = _piece(found, again)
        if store.match(piece.path, turn.access.readers).tokens < piece.kept[-1][1]:
            return start  # evicted
        stop = found.start + again
        if (
            stop > start.covered
            and self._space.engine.feed(start.run, prompt.ids[start.covered : stop], cancelled) is None
        ):
            raise Cancelled("the turn was cancelled while it read its prompt")
        importing, first = time.perf_counter(), kv.tokens
        positions, pages = bring(store, (piece,), kv, turn.access.readers)
        rope.move(self._space.rotary, kv, [*range(first), *positions])
        before = _before(start, prompt.ids[:stop])
        source = Source(Assembly(), found.start + found.tokens, (*before, piece))
        assembly = self.assemblies.make(prompt.ids, start.assembly.dropped if start.assembly else (), source)
        moved = abs(found.start - found.source - found.sequence.shift)
        why = (
            f"spliced: KV of {piece.tokens} tokens that was computed behind another prompt, moved by {moved}; the "
            f"first {again} of that text were read anew"
        )
        mode = Plan(Mode.PARTIAL, start.plan.reused_tokens + piece.tokens, (*start.plan.reasons, why))
        return replace(
            start, run=self._space.engine.begin(kv), plan=mode, assembly=assembly, covered=source.covered,
            import_ms=start.import_ms + (time.perf_counter() - importing) * 1000,
            pages=(*start.pages, *(page for page, _ in start.match.runs), *pages),
            earlier=(*start.earlier, (start.assembly, prompt.ids[:stop])),
        )  # fmt: skip

    def watching(self) -> AbstractContextManager[None]:
        """Around the reading of a prompt: looks at attention if that decides what is dropped."""
        if self._space.settings.fit != "drop_least_attended":
            return nullcontext()
        if self._meter is None:
            self._meter = AttentionMeter(self._space.engine.model)
        return self._meter.watching()

    def keep(self, start: Start, ids: Ids, prompt: Prompt, turn: Turn) -> None:
        """Remember a turn whose KV is in the store now. ids: of its prompt and answer, as far as they were fed."""
        self._forget_others()
        assembly = start.assembly or Assembly()
        if start.assembly:
            self.assemblies.keep(start.assembly)
        if self._space.settings.splice:
            for behind, read in (*start.earlier, (start.assembly, ids)):
                behind = behind or Assembly()
                own = read[len(behind.prefix) :]
                if own:
                    self._sequences.add(Sequence(own, behind.path(read), behind.tokens, start.owners))
        if self._meter:
            whole = ((0, len(prompt.ids)),)
            kept = [i for a, b in spans.without(whole, assembly.dropped) for i in range(a, b)]
            self._attended.add(prompt.ids, self._meter.mass, kept, start.owners, turn.access.readers)


def _told(fitted: Fitted, short: Shortened, tokens: int) -> Fitted:
    """With what shortening did, which left out `tokens`."""
    if not short.messages:
        return fitted
    why = f"fitted: {tokens} tokens were left out of the middle of {short.messages} long messages"
    return replace(fitted, dropped_tokens=fitted.dropped_tokens + tokens, reasons=(*fitted.reasons, why))


def _piece(found: Segment, again: int) -> Piece:
    kept = ((found.source + again, found.source + found.tokens),)
    return Piece(found.sequence.path, kept, found.sequence.shift, found.start - found.source)


def _before(start: Start, ids: Ids) -> tuple[Piece, ...]:
    """Where the KV of `ids`, which a turn has read or been handed, will be."""
    behind = start.assembly or Assembly()
    path = behind.path(ids)
    own = Piece(path, ((0, len(path)),), behind.tokens, len(behind.prefix))
    return (*behind.pieces, own) if path else behind.pieces
