"""A running turn, as the engine feeds it."""

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor
from transformers.cache_utils import Cache

from qkvshare_agents.kv.shape import WATCHED
from qkvshare_agents.kv.working_cache import KVCache


@dataclass
class Run:
    """A running turn: transformers' cache, and our KVCache behind it unless the model can't hand KV over.

    active_from: the token from which on an adapter is active that tokens of the prompt activate; None if none is.
    """

    cache: Cache | None
    kv: KVCache | None
    tokens: int
    ids: list[int] = field(default_factory=list)  # what was fed to an empty cache, for models that need it again
    active_from: int | None = None
    expected: deque[Tensor] = field(default_factory=lambda: deque(maxlen=WATCHED))  # logits behind the last tokens
