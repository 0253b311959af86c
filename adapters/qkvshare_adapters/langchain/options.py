"""The options of `HostSettings` and `Sampling` as pydantic fields, with their defaults."""

from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from qkvshare_agents.prompt.layout import SHARED_SYSTEM, Layout
from qkvshare_agents.settings import Fit, HostSettings


class ChatOptions(BaseModel):
    """How a chat model's host works, and how it chooses tokens."""

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
    repeat_instruction_tokens: int = HostSettings.repeat_instruction_tokens
    packed_history: bool = False
    handoff: bool = True
    measure_replay: bool = False
    canary_limit: float | None = None
    coarse_limit: float = HostSettings.coarse_limit
    refresh_every: int = 0
    context_tokens: int | None = None
    fit: Fit = "drop_head"
    splice: bool = False
    recompute_tokens: int = 16
    projectors: tuple[str, ...] = ()
    lora: Literal["refuse", "share_base"] = "refuse"

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 512
    stop: list[str] | None = Field(default=None, alias="stop_sequences")

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop
