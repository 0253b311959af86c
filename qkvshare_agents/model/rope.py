"""How a model turns its keys by position, measured; and keys moved to other positions.

Rotary embeddings turn pairs of a key's values by an angle that grows with the position, so that a cached key moves by
being turned a bit further (RoFormer, arXiv 2104.09864). Which values form a pair, how many are turned and by which
frequencies differs from family to family and from layer to layer, and configurations don't say it reliably. So one
token is read alone at several positions: attention to nothing but itself depends on no position, and in every layer
its KV may differ by the rotation only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from qkvshare_agents.kv.span import Span
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_kernels import backend

if TYPE_CHECKING:
    from qkvshare_agents.model.engine import Engine

_POSITIONS = (3, 977)  # besides 0: the layout is found at one and verified at the other
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}  # of the largest value; 16 bits round the angles' cosines, too
_COARSE = 2e-2


@dataclass(frozen=True)
class Turn:
    """What is turned in one layer: `2 * len(frequencies)` values from `first` on, of the keys or (latent attention,
    which keeps its shared rotary key there) of the values. interleaved: pairs are neighbours, else half of them apart.
    """

    part: Literal["keys", "values"]
    first: int
    frequencies: tuple[float, ...]
    interleaved: bool

    @property
    def width(self) -> int:
        return 2 * len(self.frequencies)

    def apply(self, x: Tensor, angles: Tensor) -> None:
        """Turn x [..., T, D] in place by angles [T, width / 2]."""
        cos, sin = angles.cos().to(torch.float32), angles.sin().to(torch.float32)
        backend.kernels(x.device).turn(x, cos, sin, self.first, self.interleaved)

    def angles(self, old: Tensor, new: Tensor) -> Tensor:
        """By how much tokens at positions `old` [T] turn on their way to `new` [T], as the model would: it rounds each
        angle to float32."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=old.device)
        before, after = (positions.float()[:, None] * frequencies for positions in (old, new))
        return after.double() - before.double()


@dataclass(frozen=True)
class Rotary:
    """layers: what is turned in each attention layer, None where keys don't know their position. refusal: why keys
    of this model can't be moved, or None."""

    layers: tuple[Turn | None, ...] = ()
    refusal: str | None = None

    def move(self, span: Span, old: Sequence[int], new: Sequence[int]) -> None:
        """Turn the keys of tokens that were computed at positions `old` in place, so that they are those of `new`."""
        if list(old) == list(new):
            return
        for block in span.blocks:
            was, becomes = (torch.tensor(list(p), device=block.keys.device) for p in (old, new))
            turns = [self.layers[layer] for layer in block.layers]
            for turn in {turn for turn in turns if turn}:
                part, angles = block.keys if turn.part == "keys" else block.values, turn.angles(was, becomes)
                rows = [row for row, other in enumerate(turns) if other == turn]
                if len(rows) == len(turns):  # one call for all layers takes a fraction of the time
                    turn.apply(part, angles)
                else:
                    for row in rows:
                        turn.apply(part[row], angles)

    def describe(self) -> str:
        """For people: what is turned, by layer kind."""
        if self.refusal:
            return self.refusal
        kinds = {
            f"{turn.width} dimensions of the {turn.part}, {'neighbours' if turn.interleaved else 'halves'}"
            if turn
            else "not turned"
            for turn in self.layers
        }
        return "; ".join(sorted(kinds))


def measure(engine: "Engine") -> Rotary:
    """Find the rotation of every layer from one token at three positions. Three forwards of one token."""
    if engine.refusal or engine.shape is None:
        return Rotary(refusal=engine.refusal or "the model's KV has no shape")
    if engine.has_state:
        return Rotary(refusal="recurrent state can't be cut or moved")
    limit = min(engine.context_tokens, engine.kv_limit_tokens or engine.context_tokens)
    positions = [0, *(min(p, limit - 2 + i) for i, p in enumerate(_POSITIONS))]
    caches = [_read_alone(engine, position) for position in positions]
    layers: list[Turn | None] = []
    for layer in range(engine.shape.layers if engine.driver.takes_positions else 1):
        alone = [(keys[:, -1:], values[:, -1:]) for keys, values in (kv.layer(layer) for kv in caches)]
        found = _turn_of(engine, alone, positions)
        if isinstance(found, str):
            return Rotary(refusal=f"keys of {engine.config.model_type} can't be moved: {found}")
        layers.append(found)
    # Without an argument for positions the token stands behind others, and only in layer 0 is its KV its own
    return Rotary(tuple(layers) if engine.driver.takes_positions else (layers[0],) * engine.shape.layers)


def of_stored(engine: "Engine") -> Rotary:
    """As `measure`, but of KV that is stored, which can't be put together where it is no more than a window."""
    if engine.shape and engine.shape.window and not engine.refusal:
        return Rotary(refusal="layers with a window keep no more than that window")
    return measure(engine)


def _read_alone(engine: "Engine", position: int) -> KVCache:
    """KV of a token that is read at `position` behind nothing; behind others if the model counts by itself."""
    assert engine.shape is not None
    token, kv = engine.driver.probe_ids(2)[1], KVCache(engine.shape)
    run = engine.begin(kv)
    if engine.driver.takes_positions:
        run.tokens = position
    engine.feed(run, [token] if engine.driver.takes_positions else [token] * (position + 1))
    return kv


def _frequencies(engine: "Engine") -> list[tuple[float, ...]]:
    """The different sets of rotary frequencies that the model holds, longest first."""
    found = {tuple(b.float().tolist()) for name, b in engine.model.named_buffers() if "inv_freq" in name}
    return sorted(found, key=lambda frequencies: (-len(frequencies), frequencies))


def _turn_of(engine: "Engine", alone: Sequence[tuple[Tensor, Tensor]], positions: Sequence[int]) -> Turn | str | None:
    """The rotation that leads from (keys, values) [H, 1, D] at the first position to those at the others."""
    (keys, values), tolerance = alone[0], _TOLERANCE.get(alone[0][0].dtype, _COARSE)

    def fits(turn: Turn | None) -> bool:
        for (there_keys, there_values), position in zip(alone[1:], positions[1:], strict=True):
            moved = keys.float().clone(), values.float().clone()
            if turn:
                at = torch.tensor([positions[0], position], device=keys.device)
                turn.apply(moved[0] if turn.part == "keys" else moved[1], turn.angles(at[:1], at[1:]))
            for ours, theirs in zip(moved, (there_keys.float(), there_values.float()), strict=True):
                if not float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max()):
                    return False
        return True

    candidates = (t for f in _frequencies(engine) for t in _turns(f, keys.shape[-1], values.shape[-1]))
    for turn in (None, *candidates):
        if fits(turn):
            return turn
    return "they depend on the position in another way than by a rotation (learned positions?)"


def _turns(frequencies: tuple[float, ...], key_dim: int, value_dim: int) -> list[Turn]:
    width = 2 * len(frequencies)
    parts: tuple[tuple[Literal["keys", "values"], int], ...] = (("keys", key_dim), ("values", value_dim))
    return [
        Turn(part, first, frequencies, interleaved)
        for part, dim in parts
        if width <= dim
        for first in dict.fromkeys((0, dim - width))
        for interleaved in (False, True)
    ]


def move(rotary: Rotary, kv: KVCache, old: Sequence[int]) -> None:
    """Move all tokens of `kv`, which were computed at positions `old`, to where they stand."""
    first = next((i for i, position in enumerate(old) if position != i), len(old))
    if first < len(old):
        rotary.move(kv.span(first, len(old)), old[first:], range(first, len(old)))
