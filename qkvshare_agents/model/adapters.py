"""What a loaded model is right now: its base, the adapters in effect, and whether that changed.

An adapter (LoRA and what else `peft` offers) is told from its base by the names of parameters. Its fingerprint is of
what it does, its tensors and settings, whatever it is called.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qkvshare_agents.model import fingerprint
from qkvshare_agents.model.fingerprint import Fingerprint
from qkvshare_agents.model.weights import Offloaded, Weight, named_weights, plain_tensors

BASE = "()"  # no adapter
_WRAPPERS = ("base_layer", "original_module")
# Of an adapter's settings, what says where it came from or how it is run
_NOT_IDENTITY = {"base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "task_type"}
_REMEMBERED = 16  # fingerprints of states that the model was in: switching back and forth costs no hashing


class Identity:
    """Of one model; takes its fingerprint again when a parameter was changed, or another adapter is in effect."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._known: OrderedDict[tuple[Any, ...], Fingerprint] = OrderedDict()

    @property
    def fingerprint(self) -> Fingerprint:
        stamp = self._stamp()
        if stamp not in self._known:
            self._known[stamp] = self._take()
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return self._known[stamp]

    def _take(self) -> Fingerprint:
        tokenizer = self._tokenizer
        base, adapters = split(self._model)
        return Fingerprint(
            architecture=fingerprint.hash_config(self._model.config.get_text_config().to_dict()),
            weights=fingerprint.hash_weights(base.items()),
            lora_adapters=_hash_adapters(self._model, adapters),
            dtype=str(self._model.dtype),
            tokenizer=fingerprint.hash_text(tokenizer.backend_tokenizer.to_str()),
            chat_template=fingerprint.hash_text(str(getattr(tokenizer, "chat_template", ""))),
        )

    def _stamp(self) -> tuple[Any, ...]:
        """Changes when any weight is written to in place, replaced, or joined by an adapter's.

        Writes through `.data`, as when an adapter is merged, move no version counter: one element of every
        tensor is looked at, too.
        """
        tensors = plain_tensors(self._model)
        files: frozenset[Any] = frozenset()
        if tensors is None:
            weights = [weight for _, weight in named_weights(self._model)]
            elsewhere = [weight.stamp() for weight in weights if isinstance(weight, Offloaded)]
            tensors = [weight for weight in (*weights, *elsewhere) if isinstance(weight, Tensor)]
            files = frozenset(stamp for stamp in elsewhere if not isinstance(stamp, Tensor))
        versions = sum(t._version for t in tensors if not t.is_inference())
        places = hash(tuple(t.data_ptr() for t in tensors))
        return len(tensors), versions, _looked_at(tensors), places, files, in_effect(self._model)


@torch.no_grad()
def _looked_at(tensors: Sequence[Tensor]) -> tuple[bytes, ...]:
    """One element of each, gathered in one piece from every device and dtype: each piece is waited for."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        if t.numel():
            at = t.storage_offset() + sum(n // 2 * step for n, step in zip(t.shape, t.stride(), strict=True))
            alike.setdefault((t.device, t.dtype), []).append(t.as_strided((1,), (1,), at))
    return tuple(bytes(torch.cat(held).view(torch.uint8).cpu().tolist()) for held in alike.values())


def in_effect(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the adapters that take part in a forward, in alphabetical order; of merged ones, too."""
    names: set[str] = set()
    for module in _adapted(model):
        if not module._disable_adapters:
            active = module.active_adapters if hasattr(module, "active_adapters") else module.active_adapter
            names |= {active} if isinstance(active, str) else set(active)
        names |= set(getattr(module, "merged_adapters", ()))
    return tuple(sorted(names & _settings(model).keys()))


def invocation(model: Any) -> tuple[int, ...]:
    """The token ids that activate the adapter in effect (`peft`'s activated LoRA); () if none need be there.

    Before the last place in a prompt where they stand, the model is its base.
    """
    if not _settings(model) or not hasattr(model, "special_peft_forward_args"):
        return ()
    found = (getattr(_settings(model)[name], "alora_invocation_tokens", None) for name in in_effect(model))
    return tuple(next((tokens for tokens in found if tokens), ()))


def active_from(model: Any, ids: Sequence[int]) -> int | None:
    """Where in a prompt an adapter that its tokens activate becomes active; None without any."""
    tokens = invocation(model)
    starts = range(len(ids) - len(tokens), -1, -1) if tokens else ()
    return next((start for start in starts if tuple(ids[start : start + len(tokens)]) == tokens), None)


def activated_only(model: Any) -> bool:
    """Whether every adapter in effect is one that tokens activate."""
    settings = [_settings(model)[name] for name in in_effect(model)]
    return bool(invocation(model)) and all(getattr(s, "alora_invocation_tokens", None) for s in settings)


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model is its base."""
    before = [(module, module._disable_adapters) for module in _adapted(model)]
    try:
        for module, _ in before:
            module._disable_adapters = True
        yield
    finally:
        for module, disabled in before:
            module._disable_adapters = disabled


def merged(model: PreTrainedModel) -> bool:
    """Whether an adapter was merged into the weights, so that the base is not there."""
    return any(getattr(module, "merged_adapters", ()) for module in _adapted(model))


def at_the_end(model: PreTrainedModel, last: int) -> bool:
    """Whether adapters in effect change nothing before layer `last` and are in the model itself.

    By the first number in a module's name: probing would not show what changes few tokens or experts only.
    """
    names = in_effect(model)
    adapted = {id(module) for module in _adapted(model) if any(_has(module, name) for name in names)}
    for name, module in model.named_modules():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if id(module) in adapted and (layer != last if layer is not None else name.split(".")[-1] != "lm_head"):
            return False
    return bool(adapted) and not merged(model)


def split(model: PreTrainedModel) -> tuple[dict[str, Weight], dict[str, dict[str, Weight]]]:
    """(weights of the base, those of every adapter by its name), under the names that they have without each other."""
    base: dict[str, Weight] = {}
    adapters: dict[str, dict[str, Weight]] = {}
    names = _settings(model).keys()
    places = {place for module in _adapted(model) for place in _places(module)}
    for name, weight in named_weights(model):
        parts = [part for part in name.removeprefix("base_model.model.").split(".") if part not in _WRAPPERS]
        at = next((i for i, part in enumerate(parts) if i and parts[i - 1] in places and part in names), None)
        if at is None:
            base[".".join(parts)] = weight
        else:
            adapters.setdefault(parts[at], {})[".".join((*parts[:at], "*", *parts[at + 1 :]))] = weight
    return base, adapters


def _adapted(model: PreTrainedModel) -> list[Any]:
    """Modules that an adapter has wrapped. By what they have: `peft` need not be installed."""
    if not _settings(model):
        return []
    wrapped: list[Any] = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
    return [m for m in wrapped if any(hasattr(m, name) for name in _WRAPPERS)]


def _places(module: Any) -> tuple[str, ...]:
    """Attributes of an adapted module in which adapters have something under their names."""
    named = (*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ()))
    return (*named, "modules_to_save")


def _has(module: Any, adapter: str) -> bool:
    return any(adapter in getattr(module, place, ()) for place in _places(module))


def _settings(model: Any) -> dict[str, Any]:
    """Of every loaded adapter, by name."""
    found = getattr(model, "peft_config", None)
    return found if isinstance(found, dict) else {}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def _hash_adapters(model: PreTrainedModel, adapters: dict[str, dict[str, Weight]]) -> str:
    """SHA-256 over what the adapters in effect do, or BASE."""
    names, digests = in_effect(model), []
    for name in names:
        config = {key: value for key, value in _settings(model)[name].to_dict().items() if key not in _NOT_IDENTITY}
        scaling = [m.scaling.get(name) for m in _adapted(model) if isinstance(getattr(m, "scaling", None), dict)]
        said = json.dumps(
            [config, scaling], sort_keys=True, default=lambda x: sorted(x) if isinstance(x, set) else str(x)
        )
        digests.append(fingerprint.hash_text(said) + fingerprint.hash_weights(adapters.get(name, {}).items()))
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest() if names else BASE
