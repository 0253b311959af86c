"""Everything that must be equal to read another's KV."""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from qkvshare_agents.model.weights import Weight, loaded

# Entries of a model's config that say where it came from or how it is run, not what it computes.
_NOT_IDENTITY = {
    "_name_or_path", "_from_model_config", "architectures", "dtype", "torch_dtype", "transformers_version",
    "use_cache", "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id",
}  # fmt: skip


@dataclass(frozen=True)
class Fingerprint:
    """Hex SHA-256 per aspect; two models may exchange KV only if all are equal."""

    architecture: str
    weights: str
    lora_adapters: str
    dtype: str
    tokenizer: str
    chat_template: str

    @property
    def digest(self) -> bytes:
        """One SHA-256 over all aspects."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()

    def differences(self, other: "Fingerprint") -> list[str]:
        """Names of the aspects that differ, for the report of a text replay."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def hash_config(config: dict[str, Any]) -> str:
    """SHA-256 of a model config's entries that decide what the model computes."""
    kept = {key: value for key, value in config.items() if key not in _NOT_IDENTITY}
    return hash_text(json.dumps(kept, sort_keys=True, default=str))


def hash_weights(tensors: Iterable[tuple[str, Weight]]) -> str:
    """SHA-256 over every byte of every tensor: a fine-tune may touch any of them (about 1 s per GB and core).

    Offloaded ones are read one after the other, at most 8 at a time.
    """
    with ThreadPoolExecutor(max_workers=min(8, torch.get_num_threads())) as pool:
        named = sorted(tensors, key=lambda item: item[0])
        digests = list(pool.map(lambda item: _hash_tensor(item[0], loaded(item[1])), named))
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _hash_tensor(name: str, tensor: Tensor) -> bytes:
    head = f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(head + hashlib.sha256(data).digest()).digest()
