"""How much attention each token of the context receives, seen while a prompt is read.

In an observed forward the keys are weighed for a few of the queries once more.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qkvshare_agents.ids import Ids
from qkvshare_agents.model.attention_hook import KNOWN, configs_of, looking, native, original, visible
from qkvshare_agents.store.runs import Readers

_ROWS = 16  # queries of each forward that are looked at
_MOST = 64  # conversations that are remembered


class AttentionMeter:
    """Of one model; one forward at a time.

    mass: what tokens received in what was observed last, summed over layers, heads and queries, and by how many of
    these it could be seen [2, T]; empty where the model's attention can't be observed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._configs = configs_of(model)
        self._implementation = ""
        self.mass = torch.zeros(2, 0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the forwards inside."""
        self.mass = torch.zeros(2, 0)
        self._implementation = str(self._model.config._attn_implementation)  # changes when packed pages are read
        if self._implementation not in KNOWN:
            yield
            return
        with looking(self._configs, self._implementation, f"qkvshare_metered_{self._implementation}", self._attend):
            yield

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Any,
        value: Any,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> Any:
        """query [1, HQ, n, D], key [1, H, T, D]: the model's own attention, and a look at some rows of it."""
        output = original(module, self._implementation)(module, query, key, value, attention_mask, **options)
        key, _ = native(key, value)
        rows, tokens = query.shape[2], key.shape[2]
        seen = torch.arange(rows - 1, -1, -max(1, rows // _ROWS), device=query.device)[:_ROWS]
        grouped = query[0, :, seen].reshape(key.shape[1], -1, query.shape[-1])
        scores = (grouped @ key[0].transpose(1, 2)).float() * (options.get("scaling") or query.shape[-1] ** -0.5)
        hidden = ~visible(attention_mask, seen, rows, tokens).repeat(query.shape[1] // key.shape[1], 1)
        weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
        found = torch.stack([weights.sum((0, 1)), (~hidden).sum(0) * float(key.shape[1])]).cpu()
        self.mass = found + torch.nn.functional.pad(self.mass, (0, tokens - self.mass.shape[1]))
        return output


class Attended:
    """Attention that tokens received, by the ids that they stand behind, over the turns of each conversation."""

    def __init__(self) -> None:
        self._known: OrderedDict[Ids, tuple[Tensor, tuple[str, ...]]] = OrderedDict()

    def add(
        self, ids: Ids, mass: Tensor, kept: Sequence[int], owners: tuple[str, ...], readers: Readers | None
    ) -> None:
        """mass: of the tokens `kept` of `ids` in a turn (`AttentionMeter`), beside what they had received before."""
        if mass.shape[1] != len(kept):
            return
        before = self._of(ids, readers)
        total = torch.nn.functional.pad(before, (0, len(ids) - before.shape[1]))
        total[:, torch.tensor(list(kept), dtype=torch.long)] += mass
        self._known[ids] = total, owners
        self._known.move_to_end(ids)
        while len(self._known) > _MOST:
            self._known.popitem(last=False)

    def of(self, ids: Ids, readers: Readers | None) -> Tensor:
        """What the leading `ids` received from a query that could see them, in the mean, as far as it is known from
        turns whose owners `readers` may read."""
        mass, queries = self._of(ids, readers)
        return mass / queries.clamp_min(1)

    def _of(self, ids: Ids, readers: Readers | None) -> Tensor:
        best = torch.zeros(2, 0)
        for known, (mass, owners) in self._known.items():
            if readers is None or readers & set(owners):
                common = next((i for i, pair in enumerate(zip(known, ids, strict=False)) if pair[0] != pair[1]), None)
                common = min(len(known), len(ids)) if common is None else common
                if common >= best.shape[1]:
                    best = mass[:, :common]
        return best.clone()
