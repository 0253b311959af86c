"""What a host is opened with."""

import os
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.kv.page import PRESETS, Precision, current_name, preset
from qkvshare_agents.model.canary import COARSE
from qkvshare_agents.model.catalog import DTYPES
from qkvshare_agents.prompt.cue import REPEATED_TOKENS
from qkvshare_agents.prompt.layout import LAYOUTS, SHARED_SYSTEM, Layout
from qkvshare_agents.wire.integrity import check_secret

Fit = Literal["drop_head", "drop_least_attended", "summarise", "error"]

FITS: tuple[Fit, ...] = ("drop_head", "drop_least_attended", "summarise", "error")

SHORTEST_CONTEXT = 64  # tokens; less can't hold the delimiters of a turn and an answer

JOINT = "joint"  # widths are chosen for all agents together: `residents`


@dataclass(frozen=True)
class HostSettings:
    """A model, and how its KV is laid out, stored and shared.

    model: local directory, pulled name, Hub id, or a name given to `use_model`. dtype: `auto` takes what the checkpoint
    has. device: of the whole model (default: cuda if there is one). device_map: transformers' own, for layers on
    several devices or (with an offload_folder) on disk; their KV lies where they run. precision: a preset's name;
    `joint` chooses widths for every agent, layer, keys and values so that the budget holds and attention moves least
    (average_bits: at most so many bits per value on average). budget_bytes: pages kept, over all agents. layout:
    `relay` or `stock` (see transcript). system: the text that is the same for every agent of the relay layout.
    repeat_instruction_tokens: a cue of the relay layout repeats its agent's instruction in full up to so many tokens,
    and of a longer one the first sentences that fit (0: only an agent's first cue in the prompt has it). salt:
    hosts with another salt never find each other's pages (default: $QKVSHARE_SALT). secret: signs packages for other
    processes, which need the same one (default: $QKVSHARE_SECRET; "": unsigned).
    decoding: `loop` decodes by our own loop, `generate` by transformers' `generate`, whose static caches torch.compile
    needs; `auto`: `generate` only where our loop would read the whole text anew for every token.
    share: where conversations that go on in other processes find each other's KV: `shm`, `redis://...`, `rediss://...`
    (default: $QKVSHARE_SHARE; "": nowhere).
    packed_history: a turn reads what it continues from where it is stored, packed, and makes no native copy of it: less
    memory, slower prompts (not together with `splice`, nor for layers with a window).
    context_tokens: use less than the model's context (None: all of it). fit: what becomes of a prompt that does not
    fit into it together with its answer: `drop_head` drops the oldest messages, `drop_least_attended` those that
    received least attention, `summarise` lets the agent sum up the older messages first, `error` raises
    ContextOverflow. System text, tools, instruction, task and the newest user message stay.
    splice: in the `stock` layout, continue from KV of what others said although it was computed behind another prompt.
    An approximation; the first `recompute_tokens` of such a text are computed anew.
    projectors: files of `qkvshare projector`, by which KV of other models is taken as an approximation.
    handoff: False replays text on every turn, the baseline. measure_replay: also time a text replay after
    every turn. canary_limit: how far KV of another process may be off what its sender's said, in nats per token
    (default: by the model's dtype, see `drift`; inf: not compared, and sent without). coarse_limit: how far packed KV
    may be off native KV before it leaves. refresh_every: KV that so many handoffs lie behind is computed anew from the
    text (0: never). lora: what adapters have to do with each other's KV. `refuse`: nothing, each makes another model.
    `share_base`: those of one base share it. That is exact between adapters that change the end of the last layer only;
    else it is an approximation, and the report says so.
    """

    model: str
    dtype: str = "auto"
    device: str | None = None
    device_map: str | dict[str, int | str] | None = None
    offload_folder: str | None = None
    attn_implementation: str | None = None
    decoding: Literal["auto", "loop", "generate"] = "auto"
    thinking: bool = False
    precision: str = "safe"
    average_bits: float | None = None
    budget_bytes: int = 2 * 1024**3
    layout: Layout = "relay"
    system: str = SHARED_SYSTEM
    repeat_instruction_tokens: int = REPEATED_TOKENS
    salt: str = field(default_factory=lambda: os.environ.get("QKVSHARE_SALT", ""), repr=False)
    secret: str = field(default_factory=lambda: os.environ.get("QKVSHARE_SECRET", ""), repr=False)
    share: str = field(default_factory=lambda: os.environ.get("QKVSHARE_SHARE", ""), repr=False)
    packed_history: bool = False
    handoff: bool = True
    measure_replay: bool = False
    context_tokens: int | None = None
    fit: Fit = "drop_head"
    splice: bool = False
    recompute_tokens: int = 16
    projectors: tuple[str, ...] = ()
    canary_limit: float | None = None
    coarse_limit: float = COARSE
    refresh_every: int = 0
    lora: Literal["refuse", "share_base"] = "refuse"

    def __post_init__(self) -> None:
        self._check_types()
        if self.dtype not in DTYPES:
            raise InvalidSetting(f"no dtype {self.dtype!r}; choose from {', '.join(DTYPES)}")
        if self.decoding not in ("auto", "loop", "generate"):
            raise InvalidSetting(f'no decoding {self.decoding!r}; choose "auto", "loop" or "generate"')
        if self.device is not None and self.device_map is not None:
            raise InvalidSetting("device is for the whole model, device_map for its layers: give one of them")
        object.__setattr__(self, "precision", current_name(self.precision))
        if self.precision not in {*PRESETS, JOINT}:
            names = ", ".join(PRESETS)
            raise InvalidSetting(f"no preset {self.precision!r}; the presets are {names}, and {JOINT}")
        if self.average_bits is not None and (self.precision != JOINT or not 2 <= self.average_bits <= 8):
            raise InvalidSetting(
                f"average_bits={self.average_bits}: from 2 to 8, with precision={JOINT!r} only (not {self.precision!r})"
            )
        check_secret(self.secret)
        object.__setattr__(self, "projectors", tuple(self.projectors))  # JSON has lists
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
        for name in ("budget_bytes", "refresh_every", "repeat_instruction_tokens"):
            if getattr(self, name) < 0:
                raise InvalidSetting(f"{name} must not be negative: {getattr(self, name)}")
        if not self.coarse_limit > 0 or not (self.canary_limit is None or self.canary_limit > 0):  # nor NaN
            raise InvalidSetting(
                f"canary_limit ({self.canary_limit}) and coarse_limit ({self.coarse_limit}) must be above 0"
            )

    def _check_types(self) -> None:
        hints = get_type_hints(type(self))
        for f in fields(self):
            value = getattr(self, f.name)
            if not _is_a(value, hints[f.name]):
                shown = repr(value) if f.repr else f"a {type(value).__name__}"
                example = ", e.g. 2 * 1024**3 for 2 GB" if f.name.endswith("_bytes") else ""
                raise InvalidSetting(f"{f.name} must be {_named(hints[f.name])}{example}, not {shown}")

    @property
    def base_precision(self) -> Precision:
        """What all pages have in common."""
        return Precision() if self.precision == JOINT else preset(self.precision)


def _is_a(value: object, hint: Any) -> bool:
    """Whether a setting has the type that its annotation says; words of a Literal are checked with its choices."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_a(value, part) for part in arguments)
    if origin is tuple:  # or JSON's list
        return isinstance(value, tuple | list) and all(_is_a(item, arguments[0]) for item in value)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, str if origin is Literal else origin or hint)


def _named(hint: Any) -> str:
    """An annotation in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_named(part) for part in arguments)
    words: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
    words |= {type(None): "None", Literal: "text", tuple: "a list of texts", dict: "a dictionary"}
    return words.get(origin or hint, str(hint))
