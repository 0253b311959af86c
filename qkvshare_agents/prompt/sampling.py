"""How the next token is chosen, and when a turn ends."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from qkvshare_agents.errors import InvalidSetting, ModelFault


@dataclass(frozen=True)
class Sampling:
    """temperature 0 takes the most probable token. `stop` strings end the turn and are not part of the text.

    max_tokens: tokens to generate at most; None generates until the turn ends or the context is full.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 512
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop or ()))
        rules = {
            "temperature >= 0": self.temperature >= 0,
            "0 < top_p <= 1": 0 < self.top_p <= 1,
            "top_k >= 0 (0: off)": self.top_k >= 0,
            "repetition_penalty > 0": self.repetition_penalty > 0,
            "seed with at most 64 bits, or None": self.seed is None or -(2**63) <= self.seed < 2**64,
            "max_tokens >= 1 or None": self.max_tokens is None or self.max_tokens >= 1,
            "stop strings that are not empty": all(isinstance(s, str) and s for s in self.stop),
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise InvalidSetting(f"sampling needs {', '.join(broken)}; got {self}")

    def override(self, options: dict[str, Any]) -> "Sampling":
        """This sampling with some fields replaced. Raises TypeError for an unknown field."""
        names = [f.name for f in fields(self)]
        if unknown := sorted(set(options) - set(names)):
            raise TypeError(f"unknown option {', '.join(unknown)}; the options are {', '.join(names)}")
        return replace(self, **options)


class Sampler:
    """Chooses ids for one turn; repeats itself for the same seed."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def choose(self, logits: Tensor, ids: list[int]) -> int:
        """The next id from `logits` [V] (float32); `ids` are the turn's tokens so far, for the penalty.

        Raises ModelFault for NaN and Inf, which would choose a token that means nothing.
        """
        s = self._sampling
        logits = logits.cpu()
        if not logits.max().isfinite():  # NaN is larger than all
            raise ModelFault(
                "the model's logits are NaN or Inf: load it in float32 or bfloat16 (dtype=), or check its weights; "
                "nothing of this turn was kept"
            )
        if s.repetition_penalty != 1.0 and ids:
            seen = torch.tensor(sorted(set(ids)))
            scores = logits[seen]
            penalised = torch.where(scores < 0, scores * s.repetition_penalty, scores / s.repetition_penalty)
            logits = logits.index_put((seen,), penalised)
        if s.temperature == 0:
            return int(logits.argmax())
        logits = logits / s.temperature
        if 0 < s.top_k < logits.numel():
            logits = logits.masked_fill(logits < logits.topk(s.top_k).values[-1], -torch.inf)
        probabilities, order = logits.softmax(-1).sort(descending=True)
        # keep the smallest set of tokens that reaches top_p (nucleus sampling, arXiv 1904.09751)
        probabilities[probabilities.cumsum(-1) - probabilities >= s.top_p] = 0
        return int(order[torch.multinomial(probabilities, 1, generator=self._generator)])
