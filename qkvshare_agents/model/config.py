"""What a loaded model and its configuration say about themselves, under whatever name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

_WINDOWS = ("sliding_window", "attention_chunk_size")
# How many tokens an indexer picks: in the configuration, and in the modules that read it from there
_PICKED = ("index_topk", "indexer_budget", "token_budget")
_LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


def rope_switch_tokens(config: Any) -> int | None:
    """The length beyond which a `dynamic` or `longrope` model uses other frequencies for all its keys."""
    ropes = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [ropes, *(r for r in ropes.values() if isinstance(r, dict))]
    for rope in nested:
        if rope.get("rope_type", rope.get("type")) in _LENGTH_DEPENDENT_ROPES:
            original = rope.get("original_max_position_embeddings")
            return (
                original or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
            )
    return None


@contextmanager
def narrowed(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """Inside, no attention window or chunk of the model is wider than `tokens`, and no indexer picks more: the same
    weights and the same code, of which a few tokens then show what they do beyond a window."""
    before: list[tuple[Any, str, int, int]] = []
    for thing in (model.config.get_text_config(), *model.modules()):
        limits = dict.fromkeys((*_WINDOWS, *_PICKED), tokens)
        if type(rate := getattr(thing, "compress_ratio", None)) is int:
            limits["block_topk"] = tokens // rate  # of an indexer that picks blocks
        for name, limit in limits.items():
            wide = getattr(thing, name, None)
            if type(wide) is int and wide > limit:
                before.append((thing, name, wide, limit))
    try:
        for thing, name, _, limit in before:
            setattr(thing, name, limit)
        yield
    finally:
        for thing, name, wide, _ in before:
            setattr(thing, name, wide)


def picked_tokens(config: Any) -> int:
    """Behind how many tokens it shows what an indexer leaves out and how older tokens are compressed; 0 without any."""
    picked = max((number for name in _PICKED if type(number := getattr(config, name, None)) is int), default=0)
    rates = (getattr(config, "compress_rates", None) or {"": 1}).values()  # tokens that become one, by kind of layer
    return max(picked * min(rates), max(rates) if max(rates) > 1 else 0)


def eos_ids(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    found: list[int] = []
    for eos in (
        getattr(model.generation_config, "eos_token_id", None),
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    ):
        found += eos if isinstance(eos, list) else [eos] if eos is not None else []
    return found
