"""Whether KV is the same under a model's adapters and without them."""

import torch
from torch import Tensor

from qkvshare_agents.kv.state import tensors_in
from qkvshare_agents.model.adapters import activated_only, at_the_end, without_adapters
from qkvshare_agents.model.engine import Engine

_TOKENS = 12


def adapters_leave_kv(engine: Engine) -> bool:
    """Whether the model keeps the same of its tokens either way: its adapters are at the end of the last layer, and
    tokens that are read show no difference, bit for bit. Or tokens activate them: only what is before these is kept."""
    if activated_only(engine.model):
        return True
    if not at_the_end(engine.model, engine.config.num_hidden_layers - 1):
        return False
    kept = [_kept(engine)]
    with without_adapters(engine.model):
        kept.append(_kept(engine))
    return len(kept[0]) > 0 and all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


def _kept(engine: Engine) -> list[Tensor]:
    run = engine.begin(None)
    engine.feed(run, engine.driver.probe_ids(_TOKENS))
    return tensors_in([vars(layer) for layer in run.cache.layers] if run.cache else [])
