"""KV of one model made into another's, by linear maps: approximate, so only where it was asked for.

Models that read the same token ids keep related things of them. For every layer of the target one matrix, found by
ridge regression on texts that both models have read, leads from keys and values of a few layers of the source to the
target's. Keys know their position, so they are turned back to position 0 first, and turned forward afterwards. The
first tokens, to which most attention goes, are not projected: the target reads them itself, which costs nearly nothing.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, combinations_with_replacement
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qkvshare_agents.errors import PackageError, UnsupportedModel
from qkvshare_agents.ids import Ids
from qkvshare_agents.kv.shape import WATCHED, LayerGroup
from qkvshare_agents.kv.span import Block, Span
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.canary import canary_of, divergence
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.rope import Rotary, Turn, measure

_FORMAT = "qkvshare-projector-1"
_NEIGHBOURS = 1  # layers of the source on either side of the one that fits best
_REACH = 4  # how far that one is looked for from the same relative depth
_SEARCHED_TOKENS = 1024
_RIDGE = 1e-4  # of the mean square of the inputs
_READ_TOKENS = 8  # first tokens that the target reads itself
_SLACK = 1.5  # how far KV may be off the source's canaries, to the worst of the held-out texts
Groups = tuple[LayerGroup, ...]


@dataclass(frozen=True)
class Quality:
    """Of a projector, on texts that it was not fitted to: KL in nats of the target's next token against reading the
    text itself, and how often the likeliest token is equal. without: the same with no context at all. worst_canary:
    how far, in nats per token, it is off the source's canaries at most; two different models never agree."""

    mean_kl: float
    top1: float
    mean_kl_without: float
    tokens: int
    worst_canary: float


@dataclass(frozen=True)
class Projector:
    """source, target: digests of the models' fingerprints, hex. groups: the shapes of their KV.

    layers: for each layer of the target, the source's that it is made of. weights: for each layer of the target
    [inputs + 1, outputs], float16: inputs are keys and values of the source's layers, head by head, the last row is a
    constant, outputs are keys and values of the layer.
    """

    source: str
    target: str
    source_groups: Groups
    target_groups: Groups
    source_rotary: Rotary
    target_rotary: Rotary
    layers: tuple[tuple[int, ...], ...]
    weights: tuple[Tensor, ...]
    quality: Quality
    read_tokens: int = _READ_TOKENS

    @property
    def canary_limit(self) -> float:
        """Nats per token that KV may be off what the source's said."""
        return self.quality.worst_canary * _SLACK

    def fill(self, engine: Engine, ids: Sequence[int], span: Span) -> KVCache:
        """The target's KV of `ids`, whose KV in the source is `span`: the first tokens read, the others projected."""
        assert engine.shape is not None
        kv = KVCache(engine.shape)
        kv.clear(len(ids))
        engine.feed(engine.begin(kv), ids[: self.read_tokens])
        read, total = kv.tokens, len(ids)
        if read == total:
            return kv
        made = _unturned(self.source_rotary, span)
        shapes = {layer: group for group in self.target_groups for layer in group.layers}
        for layer, (used, weight) in enumerate(zip(self.layers, self.weights, strict=True)):
            shape, out = shapes[layer], _inputs(made, used)[read:] @ weight.float()
            keys, values = (
                part.view(total - read, shape.heads, -1).transpose(0, 1)
                for part in out.split([shape.heads * shape.key_dim, shape.heads * shape.value_dim], 1)
            )
            kv.append(layer, keys, values)
        self.target_rotary.move(kv.span(read, total), [0] * (total - read), range(read, total))
        return kv

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        described = {
            "source": self.source,
            "target": self.target,
            "source_groups": [asdict(group) for group in self.source_groups],
            "target_groups": [asdict(group) for group in self.target_groups],
            "source_rotary": [turn and asdict(turn) for turn in self.source_rotary.layers],
            "target_rotary": [turn and asdict(turn) for turn in self.target_rotary.layers],
            "layers": self.layers,
            "quality": asdict(self.quality),
            "read_tokens": self.read_tokens,
        }
        tensors = {str(layer): weight.contiguous() for layer, weight in enumerate(self.weights)}
        save_file(tensors, path, {"format": _FORMAT, "projector": json.dumps(described)})


def load(path: str | Path) -> Projector:
    """Read what `Projector.save` wrote. Raises PackageError for anything else."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise PackageError(f"{path} is no projector (format {str(metadata.get('format'))[:20]!r})")
            weights = [file.get_tensor(name) for name in sorted(file.keys(), key=int)]
            return _described(json.loads(metadata["projector"]), weights)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, PackageError):
            raise
        raise PackageError(f"{path} can't be read as a projector: {error}") from error


def _described(said: dict[str, Any], weights: list[Tensor]) -> Projector:
    projector = Projector(
        str(said["source"]),
        str(said["target"]),
        _groups(said["source_groups"]),
        _groups(said["target_groups"]),
        _rotary(said["source_rotary"]),
        _rotary(said["target_rotary"]),
        tuple(tuple(map(int, layers)) for layers in said["layers"]),
        tuple(weights),
        Quality(**said["quality"]),
        int(said["read_tokens"]),
    )
    sizes = [
        {layer: group.heads * (group.key_dim + group.value_dim) for group in groups for layer in group.layers}
        for groups in (projector.source_groups, projector.target_groups)
    ]
    depths = [len(sizes[1]), len(projector.layers), len(weights), len(projector.target_rotary.layers)]
    if depths != [len(sizes[1])] * 4 or len(projector.source_rotary.layers) != len(sizes[0]):
        raise ValueError("layers are missing")
    for layer, (used, weight) in enumerate(zip(projector.layers, weights, strict=True)):
        if weight.shape != (sum(sizes[0][i] for i in used) + 1, sizes[1][layer]):
            raise ValueError("the matrices do not fit the shapes")
        if not bool(weight.isfinite().all()):
            raise ValueError("the matrices hold NaN or Inf")
    return projector


def _groups(said: Sequence[dict[str, Any]]) -> Groups:
    return tuple(
        LayerGroup(tuple(map(int, g["layers"])), int(g["heads"]), int(g["key_dim"]), int(g["value_dim"])) for g in said
    )


def _rotary(said: Sequence[dict[str, Any] | None]) -> Rotary:
    def turn(t: dict[str, Any]) -> Turn:
        return Turn(t["part"], int(t["first"]), tuple(t["frequencies"]), bool(t["interleaved"]))

    return Rotary(tuple(turn(t) if t else None for t in said))


def fit(source: Engine, target: Engine, texts: Sequence[Ids], held_out: Sequence[Ids]) -> Projector:
    """Find the maps from `texts` (a few thousand tokens), and measure them on `held_out`: the first half of each is
    projected, the second half read behind it.

    Raises UnsupportedModel if the models' tokenizers differ, or a model's keys can't be turned.
    """
    if source.fingerprint.tokenizer != target.fingerprint.tokenizer:
        raise UnsupportedModel("the models' tokenizers differ: their KV is of other tokens and can't be projected")
    rotaries = measure(source), measure(target)
    for engine, rotary in zip((source, target), rotaries, strict=True):
        if rotary.refusal:
            raise UnsupportedModel(f"KV of {engine.name} can't be projected: {rotary.refusal}")
    assert source.shape is not None and target.shape is not None
    made, wanted = (
        _joined([_unturned(rotary, _filled(engine, ids).span(0, len(ids))) for ids in texts])
        for engine, rotary in zip((source, target), rotaries, strict=True)
    )
    outputs = [_inputs(wanted, (layer,))[:, :-1] for layer in range(target.shape.layers)]
    layers = _closest(made, source.shape.layers, outputs)
    projector = Projector(
        source.fingerprint.digest.hex(),
        target.fingerprint.digest.hex(),
        source.shape.groups,
        target.shape.groups,
        *rotaries,
        layers,
        tuple(weight.half() for weight in _maps(made, layers, outputs)),
        Quality(0.0, 0.0, 0.0, 0, 0.0),
    )
    return replace(projector, quality=measured(projector, source, target, held_out))


def measured(projector: Projector, source: Engine, target: Engine, texts: Sequence[Ids]) -> Quality:
    """What projecting the first half of each text does to the target's reading of the second half."""
    assert target.shape is not None
    projected, equal, without, canaries = [], [], [], []
    for ids in texts:
        head, rest = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        theirs = _filled(source, head)
        said = source.logits(theirs, rest, len(rest))
        made = projector.fill(target, head, theirs.span(0, len(head)))
        true, ours, blind = (
            target.logits(kv, rest, len(rest)).log_softmax(-1)
            for kv in (_filled(target, head), made, KVCache(target.shape))
        )
        projected.append(_kl(true, ours))
        without.append(_kl(true, blind))
        equal.append((true.argmax(-1) == ours.argmax(-1)).float())
        canaries += [divergence(canary_of(a), b) for a, b in zip(said.split(WATCHED), ours.split(WATCHED), strict=True)]
    kl, top1, blind_kl = (torch.cat(x) for x in (projected, equal, without))
    return Quality(float(kl.mean()), float(top1.mean()), float(blind_kl.mean()), len(kl), max(canaries))


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def _filled(engine: Engine, ids: Sequence[int]) -> KVCache:
    assert engine.shape is not None
    kv = KVCache(engine.shape)
    engine.feed(engine.begin(kv), ids)
    return kv


def _unturned(rotary: Rotary, span: Span) -> Span:
    """A copy in float32 as if every token stood at position 0."""
    blocks = (Block(b.layers, b.keys.to(torch.float32, copy=True), b.values.float()) for b in span.blocks)
    copied = Span(span.tokens, tuple(blocks))
    rotary.move(copied, range(span.tokens), [0] * span.tokens)
    return copied


def _joined(spans: Sequence[Span]) -> Span:
    blocks = (
        Block(same[0].layers, torch.cat([b.keys for b in same], 2), torch.cat([b.values for b in same], 2))
        for same in zip(*(span.blocks for span in spans), strict=True)
    )
    return Span(sum(span.tokens for span in spans), tuple(blocks))


def _inputs(span: Span, layers: Iterable[int]) -> Tensor:
    """[T, all keys and values of these layers + 1]; the last column is 1."""
    held = {layer: (keys, values) for layer, keys, values in span.layers()}
    columns = [part.transpose(0, 1).flatten(1) for layer in layers for part in held[layer]]
    return torch.cat([*columns, columns[0].new_ones(span.tokens, 1)], 1)


def _maps(made: Span, used: Sequence[tuple[int, ...]], outputs: Sequence[Tensor]) -> list[Tensor]:
    """The map [inputs + 1, outputs] of each layer, by ridge regression on all tokens; each pair of layers is multiplied
    once, since neighbours have it in common."""
    columns = {layer: _inputs(made, (layer,)) for layer in {i for layers in used for i in layers}}
    pairs: dict[tuple[int, int], Tensor] = {}
    maps = []
    for layers, out in zip(used, outputs, strict=True):
        for a, b in combinations_with_replacement(layers, 2):
            if (a, b) not in pairs:
                pairs[a, b] = columns[a].T @ columns[b]
        rows = [torch.cat([pairs[a, b] if a <= b else pairs[b, a].T for b in layers], 1) for a in layers]
        gram, right = torch.cat(rows), torch.cat([columns[a].T @ out for a in layers])
        constants = [end - 1 for end in accumulate(columns[a].shape[1] for a in layers)][:-1]
        kept = [i for i in range(len(right)) if i not in constants]  # every layer has brought one; the last one's stays
        maps.append(_ridge(gram[kept][:, kept], right[kept]))
    return maps


def _ridge(gram: Tensor, right: Tensor) -> Tensor:
    """Solve the normal equations gram [N, N], right [N, M], in float64."""
    gram = gram.double()
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    return torch.cholesky_solve(right.double(), torch.linalg.cholesky(gram)).float()


def _closest(made: Span, depth: int, outputs: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """For each layer of the target, the layer of the source that it follows from best, and that one's neighbours."""
    some = torch.linspace(0, made.tokens - 1, min(_SEARCHED_TOKENS, made.tokens)).long()
    part = Span(len(some), tuple(Block(b.layers, b.keys[:, :, some], b.values[:, :, some]) for b in made.blocks))
    inputs = [_inputs(part, (layer,)) for layer in range(depth)]
    grams = [x[0::2].T @ x[0::2] for x in inputs]
    chosen = []
    for index, out in enumerate(outputs):
        fitted, tested = out[some[0::2]], out[some[1::2]]
        middle = round(index * (depth - 1) / max(1, len(outputs) - 1))
        errors = {}
        for layer in range(max(0, middle - _REACH), min(depth, middle + _REACH + 1)):
            x = inputs[layer]
            errors[layer] = float((x[1::2] @ _ridge(grams[layer], x[0::2].T @ fitted) - tested).norm())
        best = min(errors, key=lambda layer: errors[layer])
        chosen.append(tuple(range(max(0, best - _NEIGHBOURS), min(depth, best + _NEIGHBOURS + 1))))
    return tuple(chosen)
