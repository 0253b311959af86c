"""Looking at a model's attention while it runs: the parts that `attention` and `observation` share.

The implementation that the configuration names is, for a while, one that calls the model's own and then looks at the
arguments. Nothing of transformers is replaced, and results are the same.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

KNOWN = ("eager", "sdpa", "qkvshare_eager", "qkvshare_sdpa")  # of transformers, and over packed pages


def configs_of(model: PreTrainedModel) -> list[Any]:
    """Every configuration that a module of the model reads its attention's implementation from."""
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


@contextmanager
def looking(configs: Sequence[Any], implementation: str, name: str, attend: Callable[..., Any]) -> Iterator[None]:
    """Let `attend` be called as `name` where `implementation` is; masks are made as for `implementation`."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            if config._attn_implementation_internal == implementation:
                config._attn_implementation_internal = name
        yield
    finally:
        for config, known in zip(configs, before, strict=True):
            config._attn_implementation_internal = known


def original(module: nn.Module, implementation: str) -> Callable[..., Any]:
    """The attention function that the module would call by itself."""
    where = sys.modules[type(module).__module__]
    eager: Any = getattr(where, "eager_attention_forward", None)
    return getattr(where, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS).get_interface(implementation, eager)


def native(key: Any, value: Any) -> tuple[Tensor, Tensor]:
    """Keys and values [1, H, T, D] that attention was called with, also for handles of `packed_attention`."""
    if packed := getattr(key, "kv", None):
        key, value = (x[None] for x in packed.dequantized(key.layer))
    return key, value


def visible(mask: Tensor | None, rows: Tensor, queries: int, tokens: int) -> Tensor:
    """Which of `tokens` keys the queries `rows`, of the last `queries` tokens, see: [len(rows), tokens], True: seen.

    mask: as attention gets it, [1, 1, queries, at least tokens], boolean or added; None: causal.
    """
    if mask is None:
        return torch.arange(tokens, device=rows.device) <= (tokens - queries + rows)[:, None]
    shown = mask[0, 0, rows, :tokens]
    return shown if shown.dtype == torch.bool else shown == 0
