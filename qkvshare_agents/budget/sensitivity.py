"""How much attention output moves when a layer's keys or values lose a bit, from what attention sees anyway.

One query `q` sees scores `s_j = c q.k_j`, weights `a = softmax(s)` and output `o = sum a_j v_j`. With keys `k + dk` and
values `v + dv` the scores move by `e_j = c q.dk_j`, the weights to `a'_j = a_j exp(e_j) / Z` with
`Z = sum a_i exp(e_i)`, and since both sets of weights sum to one, exactly

    o' - o = sum (a'_j - a_j) (v_j - o)  +  sum a'_j dv_j

**Bounded** (`key_bound`, `value_bound`: true for every error within what is given). If |e_j| <= E_j, then Z lies
between Z- = sum a_i exp(-E_i) and Z+ = sum a_i exp(E_i), so that

    |a'_j - a_j| <= a_j max(exp(E_j) / Z- - 1, 1 - exp(-E_j) / Z+)     (all E_j = E: at most a_j (exp(2E) - 1))
    keys alone:   |o' - o| <= sum |a'_j - a_j| |v_j - o|, and never more than max |v_j - o|
    values alone: |o' - o| <= sum a_j |dv_j|

E_j is c sum_d |q_d| |dk_jd|, query and keys rotated if pages rotate keys. A group of range R that is rounded to b
bits errs by at most R / (2 (2**b - 1)) (`half_steps`; plus fp16 rounding of scale and minimum). So do pages at 8 bits;
below, the codec moves the ends of the range inwards and clamps, and the largest error has to be measured.

**Estimated** (`measure`, `Unit`: what allocation uses, since not all tokens err as badly as they can in the same
direction). Errors are taken as independent, with mean zero. Those of a key's channel have the variance n R**2, those of
a value's entries together n |v_j|**2; n depends on the width and was measured once for this codec, on normally
distributed numbers (`NOISE`). Then e_j has the variance n t, t = c**2 sum_d q_d**2 R_d**2; E(exp(e) - 1) = n t / 2
and E(exp(e) - 1)**2 = n t + 7/4 (n t)**2 up to the second order in n t, so that

    keys:   E|o' - o|**2 ~ n A + n**2 C,  A = t sum a_j**2 |v_j - o|**2,  C = t (7/4 A + t/4 |sum a_j (v_j - o)|**2)
    values: E|o' - o|**2 ~ n V,           V = sum a_j**2 |v_j|**2

with sums over the tokens that will lie in pages packed: neither sinks nor the newest. The last term of C is no
noise but a shift: exp(e) has a mean above one, so all noisy keys together take weight from the exact ones. R**2 is the
mean over the newest tokens' groups and taken for all. Errors of the query heads (all that share a key head's error) are
weighed by the mean square of their columns of the output projection, over the square of the residual stream behind the
block (`observation`), and averaged: how much of the stream becomes noise. What later layers make of it is not
estimated. Measured on two models, the divergence of the next token grows with about the square root of that share from
layer to layer, and as the share itself from width to width; `Unit.costs` has a power in between (EXPERIMENTS.md).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qkvshare_kernels import reference

WIDTHS = (2, 3, 4, 8)
# What allocation makes of the estimates, chosen on texts of two models (EXPERIMENTS.md)
_POWER = 0.8  # of a layer's share of noise: what it costs, beside other layers
_CLEARLY = 16  # what a step to 8 bits wins counts a so many-th: it takes the bytes of four others
# Variance of a key's error over R**2, of a value's error over its square: see tests/test_sensitivity.py
NOISE = {"keys": (7.39e-3, 1.55e-3, 3.48e-4, 1.26e-6), "values": (0.159, 4.17e-2, 9.73e-3, 3.51e-5)}


@dataclass(frozen=True)
class Unit:
    """Expected squared error of one layer at n = 1: A, C and V of this module's text."""

    keys: float = 0.0
    shift: float = 0.0
    values: float = 0.0

    def errors(self, kind: str) -> tuple[float, ...]:
        """Of `keys` or `values` at each of WIDTHS."""
        if kind == "values":
            return tuple(n * self.values for n in NOISE["values"])
        return tuple(n * self.keys + n * n * self.shift for n in NOISE["keys"])

    def costs(self, kind: str) -> tuple[float, ...]:
        """What allocation minimises: the errors, with what the estimate is not sharp enough for left out.

        Differences between layers count less than they are estimated, and so does what 8 bits win over 4.
        """
        errors = self.errors(kind)
        if errors[0] <= 0:
            return errors
        *narrow, widest = (error * errors[0] ** (_POWER - 1) for error in errors)
        return (*narrow, narrow[-1] - (narrow[-1] - widest) / _CLEARLY)

    def moved(self, towards: "Unit", share: float) -> "Unit":
        """A running mean: `share` of the way from this to `towards`."""
        pairs = ((self.keys, towards.keys), (self.shift, towards.shift), (self.values, towards.values))
        return Unit(*(old + share * (new - old) for old, new in pairs))


@dataclass(frozen=True)
class Seen:
    """What an attention call shows of one layer, at sampled query rows.

    query [HQ, N, Dk], keys [H, T, Dk], values [H, T, Dv]; HQ / H heads that follow each other share keys. visible
    [N, T]: which tokens each row attends to, positions [N]: where it stands among the T. scaling: c.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor
    positions: Tensor
    scaling: float

    @property
    def grouped(self) -> Tensor:
        """Queries beside the keys that they share: [H, R, Dk] with R = HQ / H * N."""
        return self.query.reshape(self.keys.shape[0], -1, self.query.shape[-1])

    def per_row(self, x: Tensor) -> Tensor:
        """[N, ...] -> [R, ...]: the same for each query head of a group."""
        return x.repeat(len(self.query) // len(self.keys), *(1,) * (x.dim() - 1))

    def weights(self) -> Tensor:
        """Attention [H, R, T] in float32."""
        scores = (self.grouped @ self.keys.transpose(1, 2)).float() * self.scaling
        return scores.masked_fill_(~self.per_row(self.visible), -torch.inf).softmax(-1)


def key_bound(seen: Seen, error: Tensor, *, rotated: bool = False) -> Tensor:
    """Largest |o' - o| [HQ, N] when no entry of a key errs by more than `error` [H, T, Dk] (of rotated keys, if so)."""
    a, values = seen.weights(), seen.values.float()
    most = (_turned(seen.grouped, rotated).abs() @ error.float().transpose(1, 2)) * seen.scaling
    least_sum, largest_sum = (a * (-most).exp()).sum(-1, keepdim=True), (a * most.exp()).sum(-1, keepdim=True)
    moved = a * torch.maximum(most.exp() / least_sum - 1, 1 - (-most).exp() / largest_sum)
    reach = torch.cdist(a @ values, values) * (a > 0)
    return torch.minimum((moved * reach).sum(-1), reach.amax(-1)).reshape(seen.query.shape[:2])


def value_bound(seen: Seen, error: Tensor) -> Tensor:
    """Largest |o' - o| [HQ, N] when the value of token j errs by at most `error` [H, T], the length of the error."""
    return (seen.weights() @ error.float()[..., None]).reshape(seen.query.shape[:2])


def half_steps(x: Tensor, bits: int, dim: int, group_size: int | None = None, *, symmetric: bool = False) -> Tensor:
    """Half the step of plain rounding of `x` [..., T, D], like `x`. Groups of `group_size` run along `dim` (-2 or -1).

    symmetric: the range lies evenly on both sides of zero.
    """
    reach = []
    for part in x.float().split(group_size or x.shape[dim], dim):
        high, low = part.amax(dim, keepdim=True), part.amin(dim, keepdim=True)
        reach.append((2 * torch.maximum(high, -low) if symmetric else high - low).expand_as(part))
    return torch.cat(reach, dim) / (2 * ((1 << bits) - 1))


@torch.inference_mode()
def measure(
    seen: Seen,
    newest: int,
    *,
    rotate_keys: bool,
    sinks: int,
    page_size: int,
    gain: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """A, C and V of one layer [3] in float32, means over rows and heads; on the tensors' device, nothing waits for it.

    newest: how many of the T tokens the call added; their keys give the ranges. sinks: first tokens that pages keep
    native; so are `page_size` tokens in front of each row, since the newest page is open. gain [HQ]: weight of each
    head's squared error. factors [H, Dk]: what keys are multiplied by before they are packed.
    """
    a, values, rows = seen.weights(), seen.values, seen.grouped.shape[1]
    places = torch.arange(values.shape[1], device=values.device)
    packed = (places >= sinks) & (places <= seen.positions[:, None] - page_size)
    a_packed = a * seen.per_row(packed)
    squares = a_packed * a
    sums = torch.cat([a, a_packed, squares], 1).to(values.dtype) @ values
    o, shifted, weighted = sums.float().split(rows, 1)
    lengths = (squares @ values.float().square().sum(-1, keepdim=True))[..., 0]
    apart = lengths - 2 * (o * weighted).sum(-1) + o.square().sum(-1) * squares.sum(-1)
    apart = apart.clamp_min_(0)  # a difference of large numbers
    shift = (shifted - o * a_packed.sum(-1, keepdim=True)).square().sum(-1)
    fresh = seen.keys[:, min(max(sinks, values.shape[1] - newest), values.shape[1] - 1) :]
    queries = seen.grouped
    if factors is not None:
        fresh, queries = fresh * factors[:, None], queries / factors[:, None]
    reach = _square_range(_turned(fresh, rotate_keys), page_size)
    t = seen.scaling**2 * (_turned(queries, rotate_keys).square() @ reach[..., None])[..., 0]
    found = torch.stack([t * apart, t.square() * (1.75 * apart + shift / 4), lengths]).reshape(3, len(seen.query), -1)
    return (found if gain is None else found * gain[:, None]).mean((1, 2))


def _turned(x: Tensor, rotated: bool) -> Tensor:
    return x.float() @ reference.hadamard(x.shape[-1], x.device) if rotated else x.float()


def _square_range(x: Tensor, page_size: int) -> Tensor:
    """Mean squared range [H, D] of the channels of `x` [H, T, D] in pages; tokens that fill none count only alone."""
    full = x.shape[1] // page_size * page_size
    pages = x[:, :full].unflatten(1, (-1, page_size)) if full else x[:, None]
    return (pages.amax(2) - pages.amin(2)).square().mean(1)
