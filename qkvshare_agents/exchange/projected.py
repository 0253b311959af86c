"""KV that came from another model, taken in through a projector."""

import time
from math import inf, isfinite

import torch

from qkvshare_agents.context.composer import Composer
from qkvshare_agents.exchange.admission import unsound_words
from qkvshare_agents.kv.shape import KVShape
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.canary import divergence, rows_of, weakness
from qkvshare_agents.model.projector import Projector
from qkvshare_agents.turns.report import Arrival
from qkvshare_agents.turns.workspace import Workspace
from qkvshare_agents.wire.package import Package

WHY = "projected from another model's KV"


def adopt(
    space: Workspace, composer: Composer, projector: Projector, package: Package, owners: tuple[str, ...]
) -> Arrival:
    """Project what came and keep it as an approximation, or say why not.

    It is used only if behind it the model says nearly what the other one said, as far as the two ever agree: within
    the projector's limit, unless `canary_limit` is another.
    """
    engine, ids = space.engine, package.ids[: package.covered_tokens]
    if reason := _misfit(space, projector, package) or unsound_words(engine.template.encoder, package):
        return Arrival((reason,))
    theirs = KVCache(KVShape(package.groups, torch.float32, torch.device("cpu")))
    theirs.load((step.page, step.tokens) for step in package.steps if step.page)
    started = time.perf_counter()
    kv = projector.fill(engine, ids, theirs.span(0, len(ids)))
    limit = space.settings.canary_limit or projector.canary_limit
    heard = Arrival()
    if limit < inf:
        if package.canary is None:
            return Arrival(("the package has no canary, and its KV is not used without one (canary_limit)",))
        rows = rows_of(len(ids))
        if weak := weakness(package.canary, rows, engine.model.get_input_embeddings().num_embeddings):
            return Arrival((weak,))
        kv.crop(len(ids) - rows)
        nats = divergence(package.canary, engine.logits(kv, ids[kv.tokens :], rows))
        if not nats <= limit:  # NaN, too
            reason = (
                f"KV of another model is not used: projected, it is {nats:.2g} nats off what that model said (limit "
                f"{limit:.2g})"
            )
            return Arrival((reason,), canary_nats=nats if isfinite(nats) else None, alarmed=True)
        engine.feed(engine.begin(kv), ids[kv.tokens :])
        heard = Arrival(canary_nats=nats, canary_ms=(time.perf_counter() - started) * 1000)
    composer.lay_in(ids, kv, owners, WHY)
    return heard


def _misfit(space: Workspace, projector: Projector, package: Package) -> str | None:
    engine = space.engine
    if space.rotary.refusal:
        return f"KV of another model can't be put in place: {space.rotary.refusal}"
    if package.groups != projector.source_groups:
        return "the package has KV of another shape than the projector is for"
    if any(step.page is None for step in package.steps):
        return "pages that the sender left out are not here: another model's pages are not kept"
    layers = frozenset(layer for group in package.groups for layer in group.layers)
    if (engine.shape and engine.shape.window) or not all(s.page.holds(layers) for s in package.steps if s.page):
        return "layers with a window keep no more than that window, which can't be projected"
    vocabulary = engine.model.get_input_embeddings().num_embeddings
    if max(package.ids) >= vocabulary:
        return f"the package holds token id {max(package.ids)}; the model has {vocabulary}"
    if len(package.ids) > engine.context_tokens:
        return f"the package holds {len(package.ids)} tokens; the context has {engine.context_tokens}"
    if not package.covered_tokens:
        return "the package holds no KV"
    return None
