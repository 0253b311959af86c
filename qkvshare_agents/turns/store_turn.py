"""Puts what a turn computed into the store."""

from dataclasses import replace

from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.page import Page, Precision, keep_native, seal
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.prompt.layout import Prompt
from qkvshare_agents.store.assembly import Assembly
from qkvshare_agents.turns.prefix import Start


def seal_read(
    start: Start, kv: KVCache, read: Ids, assembly: Assembly, prompt: Prompt, precision: Precision, by: str
) -> int:
    """Store what was read of the prompt `read` behind the assembly; returns how many tokens were sealed.

    by: the adapters that are in effect. Raises CodecError for NaN or Inf.
    """
    store, behind, path, sealed_tokens = start.store, assembly.tokens, assembly.path(read), 0
    if store is None:
        return 0
    window, moved = store.window, len(path) - len(read)
    header = 0 if assembly.prefix else prompt.header
    # whoever asks the same again continues before the prompt's last token, since one must be run
    points = (prompt.settled + moved, len(prompt.ids) - 1 + moved)
    seen_from = (header, *points, len(path))

    def make_page(first: int, stop: int, sealed: bool) -> Page:
        nonlocal sealed_tokens
        sealed_tokens += stop - first if sealed else 0
        span, begins = kv.span(behind + first, behind + stop), behind + first == 0
        if window and not window.sees(first, stop, seen_from):
            span = span.without(window.layers)
        page = seal(span, precision, starts_sequence=begins) if sealed else keep_native(span)
        return replace(page, hops=start.hops)

    if start.renews and not assembly.mark:
        store.renew(path, make_page, by)
    store.extend(
        path,
        precision.page_size,
        len(path) - precision.residual_length,
        make_page,
        start.owners,
        points=points,
        header=header,
        computed_from=start.covered + moved,
        by=by,
    )
    return sealed_tokens
