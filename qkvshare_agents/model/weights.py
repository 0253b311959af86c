"""The plain tensors that a model's weights consist of, those of quantized and of offloaded weights included.

Read from the modules and never by `state_dict()`: there bitsandbytes unpacks its 4-bit weights, with a loss that stays
in the model, and weights that accelerate keeps elsewhere between forwards have no values.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qkvshare_agents.errors import UnsupportedModel

_EMPTY = torch.empty(0)
_PLAIN = (Tensor, nn.Parameter)
_SAID = (bool, int, float, str, torch.dtype, tuple, torch.Size)


@dataclass(frozen=True)
class Offloaded:
    """A weight that accelerate brings to its device for a forward only; `load` reads it."""

    held: Mapping[str, Tensor]  # accelerate's map of one module's weights
    name: str

    def load(self) -> Tensor:
        return self.held[self.name]

    def stamp(self) -> Any:
        """Changes with the values: the tensor where memory holds it, else when its file was written."""
        dataset: Any = getattr(self.held, "dataset", self.held)
        key = getattr(self.held, "prefix", "") + self.name
        entry = getattr(dataset, "index", {}).get(key)
        if entry is None or key in getattr(dataset, "state_dict", {}):
            return self.load()
        file = entry.get("safetensors_file") or os.path.join(dataset.save_folder, f"{key}.dat")
        return file, os.stat(file).st_mtime_ns


Weight = Tensor | Offloaded


def named_weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Parameters and persistent buffers under the names of `state_dict()`, tied ones under each; of quantized ones
    their parts, and what says how these are read.

    Raises UnsupportedModel for a weight without values.
    """
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        buffers = {n: b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is None:
                continue
            if tensor.is_meta:
                yield prefix + name, _offloaded(module, name, prefix + name)
            else:
                yield from plain(prefix + name, tensor)
        if getattr(getattr(module, "state", None), "SCB", None) is not None:  # bitsandbytes' Linear8bitLt
            yield from _parts(f"{prefix}state", {"CB": module.state.CB, "SCB": module.state.SCB})
        if isinstance(getattr(module, "meta", None), dict):  # HQQLinear
            yield from _parts(f"{prefix}meta", module.meta)


def plain_tensors(model: nn.Module) -> list[Tensor] | None:
    """The tensors of `named_weights`, found in a fraction of the time; None where some are more than plain ones."""
    found: list[Tensor] = []
    for module in model.modules():
        if "state" in module.__dict__ or "meta" in module.__dict__:
            return None
        found += [tensor for tensor in module._parameters.values() if tensor is not None]
        passing = module._non_persistent_buffers_set
        found += [t for name, t in module._buffers.items() if t is not None and name not in passing]
    return found if all(type(t) in _PLAIN and not t.is_meta for t in found) else None


def plain(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What `tensor` consists of: itself, or the parts of a quantized one and a name that says how they are read."""
    if hasattr(tensor, "__tensor_flatten__"):  # torchao, quanto
        parts, said = tensor.__tensor_flatten__()
        yield f"{name} {type(tensor).__name__} {said!r}", _EMPTY
        for part in parts:
            yield from plain(f"{name}.{part}", getattr(tensor, part))
        return
    yield name, tensor.detach()
    for part in ("quant_state", "CB", "SCB"):  # bitsandbytes' parameters
        if (held := getattr(tensor, part, None)) is not None:
            yield from _parts(f"{name}.{part}", held)


def is_quantized(model: nn.Module) -> bool:
    """Whether transformers says that these weights are quantized; GGUF files are read as plain ones."""
    return bool(getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None))


def input_device(model: Any) -> torch.device:
    """Where token ids go: to the first layer's device, or to where accelerate brings an offloaded one."""
    hook = getattr(model, "_hf_hook", None)
    device: torch.device = model.device
    if device.type != "meta":
        return device
    place = getattr(hook, "execution_device", None)
    return torch.device("cpu") if place is None else torch.device(place)


def _parts(name: str, held: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors in an object or a mapping, with what else it says in a name."""
    if isinstance(held, Tensor):
        yield from plain(name, held)
        return
    entries = held if isinstance(held, Mapping) else vars(held)
    said = {key: str(value) for key, value in sorted(entries.items()) if isinstance(value, _SAID)}
    yield f"{name} {said}", _EMPTY
    for key, value in sorted(entries.items()):
        if isinstance(value, Tensor) or type(value) is type(held):  # scales of scales
            yield from _parts(f"{name}.{key}", value)


def _offloaded(module: nn.Module, name: str, full: str) -> Offloaded:
    hook: Any = getattr(module, "_hf_hook", None)
    for one in (hook, *getattr(hook, "hooks", ())):
        held = getattr(one, "weights_map", None)
        if held is not None:
            return Offloaded(held, name)
    raise UnsupportedModel(f"the model's {full} has no values: it was never loaded, or something else holds it")


def loaded(weight: Weight) -> Tensor:
    return weight.load() if isinstance(weight, Offloaded) else weight
