"""Models that the caller has loaded, quantized or placed, under names of this process."""

from typing import Any

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.model.catalog import is_name, known

_held: dict[str, tuple[Any, Any]] = {}


def use_model(name: str, model: Any, tokenizer: Any) -> None:
    """In this process, `name` is from now on this transformers model with its tokenizer: clients, hosts and
    `Engine.load` take it as it is. One host at a time can use it.

    Raises InvalidSetting for what is no name or no model, and for a name that is taken.
    """
    if not is_name(name) or not hasattr(model, "config") or not callable(tokenizer):
        raise InvalidSetting(f"use_model takes a plain name, a transformers model and its tokenizer; got {name!r}")
    if known(name) or _held.get(name, (model,))[0] is not model:
        raise InvalidSetting(f"the name {name!r} is another model's; choose another one, or call forget_model first")
    _held[name] = model, tokenizer


def forget_model(name: str) -> None:
    """The name is free again; a host that is open keeps the model until it closes."""
    _held.pop(name, None)


def find(name: str) -> tuple[Any, Any] | None:
    """What `use_model` was told: (model, tokenizer)."""
    return _held.get(name)
