"""The native KV that turns work on, kept from one to the next, and what the model says behind it."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

from torch import Tensor

from qkvshare_agents.errors import UnsupportedModel
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.lean_cache import LeanCache
from qkvshare_agents.kv.page import Page
from qkvshare_agents.kv.state import Snapshot
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.adapters import without_adapters
from qkvshare_agents.model.packed_attention import begin as begin_packed
from qkvshare_agents.model.run import Run
from qkvshare_agents.turns.workspace import Workspace


class Working:
    """Of one workspace, on the host's thread.

    held: the ids whose KV the cache still has, as the last turn left it.
    """

    def __init__(self, space: Workspace) -> None:
        self._space = space
        self._kv: KVCache | None = None
        self.held: Ids = ()

    def native(self, ids: Sequence[int]) -> KVCache | None:
        """The cache if it still has the KV that `ids` were last continued with."""
        if isinstance(self._kv, LeanCache) or self.held[: len(ids)] != tuple(ids):
            return None
        return self._kv

    def emptied(self, tokens: int, *, moved: bool = False) -> KVCache:
        """The cache without anything, with room for `tokens`. moved: what is loaded will be written to, so it can't
        stay packed."""
        shape, settings = self._space.engine.shape, self._space.settings
        assert shape is not None
        native = settings.splice or moved or shape.window or shape.indexed or not shape.layers
        kind = LeanCache if settings.packed_history and not native else KVCache
        if type(self._kv) is not kind or self._kv.shape != shape:
            self._kv = kind(shape)
        self.held = ()
        self._kv.clear(tokens)
        return self._kv

    def run_on(self, kv: KVCache) -> Run:
        """Start a turn on what `kv` holds, packed where it is."""
        engine = self._space.engine
        if isinstance(kv, LeanCache):
            with suppress(UnsupportedModel):  # then one layer after the other becomes native
                return replace(begin_packed(engine, kv.packed), kv=kv)
        return engine.begin(kv)

    def expected(
        self,
        runs: Iterable[tuple[Page, int]],
        ids: Sequence[int],
        count: int,
        state: Snapshot | None = None,
        *,
        apart: bool = False,
    ) -> Tensor:
        """Logits [count, V] behind each of the last `count` of `ids`, whose KV `runs` hold: read again behind it.

        state: what is behind all of `ids`; as it can't be cut, the last ones are read once more then. apart: in a cache
        of its own, so that the working cache keeps what it has.
        """
        shape = self._space.engine.shape
        assert shape is not None
        kv = KVCache(shape) if apart else self.emptied(len(ids) + count)
        kv.load(runs)
        kv.state = state
        if state is None:
            kv.crop(len(ids) - count)
        return self._said(kv, ids[-count:])

    def expected_natively(self, ids: Sequence[int], count: int, state: Snapshot) -> Tensor | None:
        """The same behind the KV that the last turn computed; None if the cache has no such KV any more."""
        kv = self.native(ids)
        if kv is None or len(self.held) != len(ids):
            return None
        kv.state = state
        return self._said(kv, ids[-count:])

    def _said(self, kv: KVCache, ids: Sequence[int]) -> Tensor:
        engine = self._space.engine
        with nullcontext() if self._space.speaks_plainly else without_adapters(engine.model):
            return engine.logits(kv, ids, len(ids))
