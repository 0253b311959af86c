"""What a loaded model and its configuration say about themselves, under whatever name."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

_WINDOWS = ("sliding_window", "attention_chunk_size")
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
    """Inside, no attention window or chunk of the model is wider than `tokens`: the same weights and the same code, of
    which a few tokens then show what they do beyond a window."""
    before: list[tuple[Any, str, int]] = []
    for thing in (model.config.get_text_config(), *model.modules()):
        for name in _WINDOWS:
            wide = getattr(thing, name, None)
            if type(wide) is int and wide > tokens:
                before.append((thing, name, wide))
    try:
        for thing, name, _ in before:
            setattr(thing, name, tokens)
        yield
    finally:
        for thing, name, wide in before:
            setattr(thing, name, wide)


def eos_ids(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    found: list[int] = []
    for eos in (
        getattr(model.generation_config, "eos_token_id", None),
        model.config.eos_token_id,
        tokenizer.eos_token_id,
    ):
        found += eos if isinstance(eos, list) else [eos] if eos is not None else []
    return found
