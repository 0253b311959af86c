"""What a host is opened with."""

import os
from dataclasses import dataclass, field
from typing import Literal

from qkvshare_agents.drift import COARSE
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.fitting import FITS, SHORTEST_CONTEXT, Fit
from qkvshare_agents.integrity import check_secret
from qkvshare_agents.page import preset
from qkvshare_agents.transcript import LAYOUTS, SHARED_SYSTEM, Layout


@dataclass(frozen=True)
class HostSettings:
    """A model, and how its KV is laid out, stored and shared.

    model: local directory, pulled name or Hub id. precision: a preset's name. budget_bytes: pages kept, over
    all agents. layout: `relay` or `stock` (see transcript). system: the text that is the same for every agent
    of the relay layout. salt: hosts with another salt never find each other's pages (default: $QKVSHARE_SALT).
    secret: signs packages for other processes, which need the same one (default: $QKVSHARE_SECRET; "": unsigned).
    share: where conversations that go on in other processes find each other's KV: `shm`, `redis://...`, `rediss://...`
    (default: $QKVSHARE_SHARE; "": nowhere).
    context_tokens: use less than the model's context (None: all of it). fit: what becomes of a prompt that does not
    fit into it together with its answer: `drop_head` drops what follows the system text, `drop_least_attended` the
    tokens that received least attention, `summarise` lets the agent sum up the older messages first, `error` raises
    ContextOverflow.
    splice: in the `stock` layout, continue from KV of what others said although it was computed behind another prompt.
    An approximation; the first `recompute_tokens` of such a text are computed anew.
    handoff: False replays text on every turn, the baseline. measure_replay: also time a text replay after
    every turn. canary_limit: how far KV of another process may be off what its sender's said, in nats per
    token (default: by the model's dtype, see `drift`; inf: not compared). coarse_limit: how far packed KV may be off
    native KV before it leaves. refresh_every: KV that so many handoffs lie behind is computed anew from the text
    (0: never). lora: what adapters have to do with each other's KV. `refuse`: nothing, each makes another model.
    `share_base`: those of one base share it. That is exact between adapters that change the end of the last layer only;
    else it is an approximation, and the report says so.
    """

    model: str
    dtype: str = "auto"
    device: str | None = None
    attn_implementation: str | None = None
    thinking: bool = False
    precision: str = "safe"
    budget_bytes: int = 2 * 1024**3
    layout: Layout = "relay"
    system: str = SHARED_SYSTEM
    salt: str = field(default_factory=lambda: os.environ.get("QKVSHARE_SALT", ""), repr=False)
    secret: str = field(default_factory=lambda: os.environ.get("QKVSHARE_SECRET", ""), repr=False)
    share: str = field(default_factory=lambda: os.environ.get("QKVSHARE_SHARE", ""), repr=False)
    handoff: bool = True
    measure_replay: bool = False
    context_tokens: int | None = None
    fit: Fit = "drop_head"
    splice: bool = False
    recompute_tokens: int = 16
    canary_limit: float | None = None
    coarse_limit: float = COARSE
    refresh_every: int = 0
    lora: Literal["refuse", "share_base"] = "refuse"

    def __post_init__(self) -> None:
        preset(self.precision)
        check_secret(self.secret)
        if self.layout not in LAYOUTS:
            raise InvalidSetting(f"no layout {self.layout!r}; the layouts are {', '.join(LAYOUTS)}")
        if self.fit not in FITS:
            raise InvalidSetting(f"no fit {self.fit!r}; choose from {', '.join(FITS)}")
        if self.splice and self.layout != "stock":
            raise InvalidSetting('splice is for layout="stock"; in the relay layout, the prompts of all agents are one')
        if self.lora not in ("refuse", "share_base"):
            raise InvalidSetting(f'no lora {self.lora!r}; choose "refuse" or "share_base"')
        if self.recompute_tokens < 0:
            raise InvalidSetting(f"recompute_tokens must not be negative: {self.recompute_tokens}")
        if self.context_tokens is not None and self.context_tokens < SHORTEST_CONTEXT:
            raise InvalidSetting(f"context_tokens must be at least {SHORTEST_CONTEXT}, not {self.context_tokens}")
        if self.budget_bytes < 0 or self.refresh_every < 0:
            raise InvalidSetting(
                f"budget_bytes ({self.budget_bytes}) and refresh_every ({self.refresh_every}) must not be negative"
            )
        if not self.coarse_limit > 0 or not (self.canary_limit is None or self.canary_limit > 0):  # nor NaN
            raise InvalidSetting(
                f"canary_limit ({self.canary_limit}) and coarse_limit ({self.coarse_limit}) must be above 0"
            )
