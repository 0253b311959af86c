"""Factors that bring key channels and what queries make of them to one size, before keys are rotated and packed.

A score is a sum over channels of `q_c * k_c`; a channel may be multiplied by any `f_c` while queries are divided by it.
A rotated key has the same error in every channel, in proportion to the length of the key, and a query gathers it in
proportion to its own length: the squared error of scores goes with `sum(f² k²) * sum(q² / f²)`, which is smallest for
`f_c = sqrt(|q_c| / |k_c|)` (Cauchy and Schwarz). That costs no bytes. SmoothQuant (arXiv 2211.10438) balances
activations and weights in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

STEPS = 8  # to a factor of 2
MOST = 40  # steps: a factor of 32 either way
_ZERO = 128


@dataclass(frozen=True)
class Balance:
    """steps: of each layer with KV, in order, one byte for each channel of each head: 128 + 8 * log2(factor)."""

    steps: tuple[bytes, ...]

    def factors(self, layers: tuple[int, ...], heads: int, device: torch.device) -> Tensor:
        """What keys [L, H, T, Dk] of `layers` are multiplied by: float32 [L, H, Dk], the same tensor each time."""
        return _factors(tuple(self.steps[layer] for layer in layers), heads, device)

    def least(self, layers: tuple[int, ...]) -> float:
        """The smallest factor of these layers."""
        return float(2.0 ** ((min(min(self.steps[layer]) for layer in layers) - _ZERO) / STEPS))


def balance_of(steps: bytes, widths: Sequence[int]) -> Balance:
    """widths: channels of all heads of each layer. Raises ValueError for factors that are further than 32 from 1."""
    if len(steps) != sum(widths) or not all(abs(step - _ZERO) <= MOST for step in steps):
        raise ValueError(f"a balance needs {sum(widths)} bytes of {_ZERO - MOST} to {_ZERO + MOST}")
    ends = list(accumulate(widths, initial=0))
    return Balance(tuple(steps[a:b] for a, b in pairwise(ends)))


def of_sizes(queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Balance:
    """The best factors where channels have these root mean squares, [H, Dk] for each layer.

    Sizes below a thousandth of a layer's mean count as that: such a channel says nothing.
    """
    return Balance(tuple(_steps(q, k) for q, k in zip(queries, keys, strict=True)))


def _steps(queries: Tensor, keys: Tensor) -> bytes:
    logs = [_log(size.cpu().double()) for size in (queries, keys)]
    wanted = (logs[0] - logs[1]) / 2
    wanted = wanted - wanted.mean(-1, keepdim=True)
    steps = (wanted * STEPS).round().clamp(-MOST, MOST).to(torch.int64) + _ZERO
    return bytes(steps.flatten().tolist())


def _log(size: Tensor) -> Tensor:
    return size.clamp_min(1e-3 * float(size.mean()) or 1.0).log2()


@lru_cache(maxsize=256)
def _factors(steps: tuple[bytes, ...], heads: int, device: torch.device) -> Tensor:
    rows = torch.tensor([list(row) for row in steps], dtype=torch.float64) - _ZERO
    return torch.exp2(rows / STEPS).float().view(len(steps), heads, -1).to(device)
