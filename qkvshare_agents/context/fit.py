"""What a prompt continues from when it does not fit into the context."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qkvshare_agents import spans
from qkvshare_agents.context.cuts import Cuts
from qkvshare_agents.context.room import Room
from qkvshare_agents.prompt.layout import Prompt
from qkvshare_agents.spans import Spans
from qkvshare_agents.store.assembly import Assemblies, Assembly, Source
from qkvshare_agents.store.runs import Readers


@dataclass(frozen=True)
class Fitted:
    """prompt: what is read as usual; the whole one if it continues from `source`, KV without the `dropped` tokens.

    assembly: how what is read behind the source is kept. reasons: what was dropped and why, for the report.
    dropped_tokens: by how many the prompt is shorter than the conversation's own, either way.
    """

    prompt: Prompt
    dropped_tokens: int = 0
    dropped: Spans = ()
    source: Source | None = None
    assembly: Assembly | None = None
    reasons: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """That are in the context when the prompt is read."""
        return len(self.prompt.ids) - spans.count(self.dropped)


def fit(
    prompt: Prompt,
    room: Room,
    cuts: Cuts,
    *,
    assemblies: Assemblies | None = None,
    readers: Readers | None = None,
    immovable: str | None = None,
    mass: Sequence[float] | None = None,
) -> Fitted:
    """Drop messages, in KV if most is reused that way, else in the text.

    cuts: of the prompt, which fits without what they may drop. mass: attention that the leading tokens received; then
    what received least goes, else what is oldest. assemblies: of the store; None if KV can't be handed over.
    immovable: why stored KV can't be moved to other positions, if so.
    """
    lacking = room.lacks(len(prompt.ids))
    if not lacking:
        return Fitted(prompt)
    dropped = cuts.plan(lacking, room)
    assert dropped is not None, "the caller has made it fit"
    text = _as_text(prompt, dropped, room, immovable)
    if assemblies is None:
        return text
    most = spans.count(dropped) + 2 * room.step  # what an earlier turn dropped stays dropped, unless it is far more
    best, reused = text, assemblies.store.match(text.prompt.ids[:-1], readers).tokens
    _remember(assemblies, prompt, dropped)
    for source in assemblies.sources(prompt.ids[:-1], readers):
        planned = _planned(cuts, lacking, room, source, mass)
        if planned is None or spans.count(source.assembly.dropped) > most:
            continue
        if planned == source.assembly.dropped and not source.assembly.mark:
            found, tokens = _as_text(prompt, planned, room, immovable), source.tokens
        elif immovable:
            continue
        elif planned == source.assembly.dropped:
            found, tokens = _moved(prompt, source, source.assembly, planned, room), source.tokens
        else:
            rest = source.without(planned)
            if rest.tokens <= planned[0][0] or planned[-1][1] > source.covered:
                continue  # nothing is stored behind what goes
            assembly = assemblies.make(prompt.ids, planned, rest)
            found, tokens = _moved(prompt, rest, assembly, planned, room), rest.tokens
        if tokens > reused or (tokens == reused and best is text):
            best, reused = found, tokens
    return best


def _planned(cuts: Cuts, lacking: int, room: Room, source: Source, mass: Sequence[float] | None) -> Spans | None:
    """What goes beside what the source has dropped; of KV by its attention if that is known."""
    already, seen = source.assembly.dropped, (mass or ())[: source.covered]
    return (cuts.plan(lacking, room, already, seen) if seen else None) or cuts.plan(lacking, room, already)


def _moved(prompt: Prompt, source: Source, assembly: Assembly, dropped: Spans, room: Room) -> Fitted:
    why = f"{_told(prompt, dropped, room)}; stored KV of {source.tokens} was moved, which is an approximation"
    return Fitted(prompt, spans.count(dropped), dropped, source, assembly, (why,))


def _as_text(prompt: Prompt, dropped: Spans, room: Room, immovable: str | None) -> Fitted:
    """The prompt without `dropped`, as if it had never been there: what is computed of it is exact."""
    because = f", since {immovable}" if immovable else ""
    shorter = Prompt(
        spans.cut(prompt.ids, dropped),
        _behind(prompt.settled, dropped),
        tuple((_behind(end, dropped), source) for end, source in prompt.answers),
        prompt.header,
    )
    return Fitted(shorter, spans.count(dropped), reasons=(f"{_told(prompt, dropped, room)}, as text{because}",))


def _remember(assemblies: Assemblies, prompt: Prompt, dropped: Spans) -> None:
    """So that KV of the cut text can be moved when more has to go."""
    stop = dropped[-1][1]
    stem = spans.cut(prompt.ids[:stop], dropped)
    assemblies.keep(Assembly(prompt.ids[:stop], dropped, stem=stem))


def _behind(at: int, dropped: Spans) -> int:
    """Where token `at` stands without those that are dropped."""
    return at - spans.count(spans.without(((0, at),), spans.without(((0, at),), dropped)))


def _told(prompt: Prompt, dropped: Spans, room: Room) -> str:
    total = len(prompt.ids)
    left = total - spans.count(dropped)
    return (
        f"fitted: {total - left} of {total} tokens were dropped ({spans.show(dropped)}), so that {left} and an "
        f"answer of {room.context - left} fit into {room.context}"
    )


def whole(fitted: Fitted) -> Prompt:
    """The prompt that a replay of the text reads."""
    return replace(fitted.prompt, ids=spans.cut(fitted.prompt.ids, fitted.dropped))
