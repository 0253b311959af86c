"""KV of one model made into another's, by linear maps: approximate, so only where it was asked for.

Models that read the same token ids keep related things of them. For every layer of the target one matrix, found by
ridge regression on texts that both models have read, leads from keys and values of a few layers of the source to the
target's. Keys know their position, so they are turned back to position 0 first, and turned forward afterwards. The
first tokens, to which most attention goes, are not projected: the target reads them itself, which costs nearly nothing.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qkvshare_agents.encoder import Ids
from qkvshare_agents.engine import Engine
from qkvshare_agents.errors import PackageError, UnsupportedModel
from qkvshare_agents.kv_cache import KVCache
from qkvshare_agents.rotary import Rotary, Turn, measure

_FORMAT = "qkvshare-projector-1"
_NEIGHBOURS = 1  # layers of the source on either side of the one that fits best
_REACH = 4  # how far that one is looked for from the same relative depth
_SEARCHED_TOKENS = 1024
_RIDGE = 1e-4  # of the mean square of the inputs
_READ_TOKENS = 8  # first tokens that the target reads itself
Shape = tuple[int, int, int, int]  # L, H, Dk, Dv


@dataclass(frozen=True)
class Quality:
    """Of a projector, on texts that it was not fitted to: KL in nats of the target's next token against reading the
    text itself, and how often the likeliest token is equal. without: the same with no context at all."""

    mean_kl: float
    top1: float
    mean_kl_without: float
    tokens: int


@dataclass(frozen=True)
class Projector:
    """source, target: digests of the models' fingerprints, hex. shapes: (L, H, Dk, Dv) of their KV.

    layers: for each layer of the target, the source's that it is made of. weights: for each layer of the target
    [len(layers) * H * (Dk + Dv) + 1, H' * (Dk' + Dv')], float16; the last row is a constant.
    """

    source: str
    target: str
    source_shape: Shape
    target_shape: Shape
    source_rotary: Rotary
    target_rotary: Rotary
    layers: tuple[tuple[int, ...], ...]
    weights: tuple[Tensor, ...]
    quality: Quality
    read_tokens: int = _READ_TOKENS

    def project(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [L, H, T, Dk] and values [L, H, T, Dv] of the source's tokens 0 to T - 1 as the target's, float32."""
        tokens, (_, heads, key_dim, value_dim) = keys.shape[-2], self.target_shape
        made = _unturned(self.source_rotary, keys, values)
        out = [_inputs(made, layers) @ w.float() for layers, w in zip(self.layers, self.weights, strict=True)]
        split = [x.split([heads * key_dim, heads * value_dim], 1) for x in out]
        target_keys, target_values = (
            torch.stack([s[part].view(tokens, heads, dim).transpose(0, 1) for s in split])
            for part, dim in enumerate((key_dim, value_dim))
        )
        self.target_rotary.move(target_keys, target_values, [0] * tokens, range(tokens))
        return target_keys, target_values

    def fill(self, engine: Engine, ids: Sequence[int], keys: Tensor, values: Tensor) -> KVCache:
        """The target's KV of `ids`, from the source's keys and values: the first tokens read, the others projected."""
        assert engine.shape is not None
        kv = KVCache(engine.shape)
        kv.clear(len(ids))
        engine.feed(engine.begin(kv), ids[: self.read_tokens])
        if len(ids) > kv.tokens:
            made = self.project(keys, values)
            kv.append_all(*(part[..., kv.tokens :, :] for part in made))
        return kv

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        described = {
            "source": self.source,
            "target": self.target,
            "source_shape": self.source_shape,
            "target_shape": self.target_shape,
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
            return _described(
                json.loads(metadata["projector"]), [file.get_tensor(k) for k in sorted(file.keys(), key=int)]
            )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, PackageError):
            raise
        raise PackageError(f"{path} can't be read as a projector: {error}") from error


def _described(said: dict[str, Any], weights: list[Tensor]) -> Projector:
    projector = Projector(
        str(said["source"]),
        str(said["target"]),
        _shape(said["source_shape"]),
        _shape(said["target_shape"]),
        _rotary(said["source_rotary"]),
        _rotary(said["target_rotary"]),
        tuple(tuple(map(int, layers)) for layers in said["layers"]),
        tuple(weights),
        Quality(**said["quality"]),
        int(said["read_tokens"]),
    )
    layers, heads, key_dim, value_dim = projector.source_shape
    target_layers, target_heads, target_key_dim, target_value_dim = projector.target_shape
    depths = (len(projector.layers), len(weights), len(projector.target_rotary.layers))
    if depths != (target_layers,) * 3 or len(projector.source_rotary.layers) != layers:
        raise ValueError("layers are missing")
    for made_of, weight in zip(projector.layers, weights, strict=True):
        rows = len(made_of) * heads * (key_dim + value_dim) + 1
        columns = target_heads * (target_key_dim + target_value_dim)
        if not all(0 <= layer < layers for layer in made_of) or weight.shape != (rows, columns):
            raise ValueError("the matrices do not fit the shapes")
        if not bool(weight.isfinite().all()):
            raise ValueError("the matrices hold NaN or Inf")
    return projector


def _shape(said: Sequence[int]) -> Shape:
    layers, heads, key_dim, value_dim = map(int, said)
    return layers, heads, key_dim, value_dim


def _rotary(said: Sequence[dict[str, Any] | None]) -> Rotary:
    return Rotary(
        tuple(
            Turn(t["part"], int(t["first"]), tuple(t["frequencies"]), bool(t["interleaved"])) if t else None
            for t in said
        )
    )


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
    pairs = [
        tuple(_unturned(r, *_read(e, ids)) for e, r in zip((source, target), rotaries, strict=True)) for ids in texts
    ]
    made = tuple(torch.cat([pair[0][part] for pair in pairs], 2)[:, :, :] for part in (0, 1))
    wanted = tuple(torch.cat([pair[1][part] for pair in pairs], 2) for part in (0, 1))
    outputs = [_inputs(wanted, (layer,))[:, :-1] for layer in range(wanted[0].shape[0])]
    layers = _closest(made, outputs)
    weights = tuple(_ridge(_inputs(made, used), out).half() for used, out in zip(layers, outputs, strict=True))
    projector = Projector(
        source.fingerprint.digest.hex(),
        target.fingerprint.digest.hex(),
        _shape_of(source),
        _shape_of(target),
        *rotaries,
        layers,
        weights,
        Quality(0.0, 0.0, 0.0, 0),
    )
    return Projector(**(vars(projector) | {"quality": _quality(projector, source, target, held_out)}))


def _quality(projector: Projector, source: Engine, target: Engine, texts: Sequence[Ids]) -> Quality:
    projected, equal, without = [], [], []
    for ids in texts:
        head, rest = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        assert target.shape is not None
        kv = KVCache(target.shape)
        target.feed(target.begin(kv), head)
        true = target.logits(kv, rest, len(rest)).log_softmax(-1)
        made = target.logits(projector.fill(target, head, *_read(source, head)), rest, len(rest)).log_softmax(-1)
        blind = target.logits(KVCache(target.shape), rest, len(rest)).log_softmax(-1)
        projected.append(_kl(true, made))
        without.append(_kl(true, blind))
        equal.append((true.argmax(-1) == made.argmax(-1)).float())
    kl, top1, blind_kl = (torch.cat(x) for x in (projected, equal, without))
    return Quality(float(kl.mean()), float(top1.mean()), float(blind_kl.mean()), len(kl))


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def _read(engine: Engine, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    assert engine.shape is not None
    kv = KVCache(engine.shape)
    engine.feed(engine.begin(kv), ids)
    return kv.span(0, len(ids))


def _unturned(rotary: Rotary, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Copies in float32 as if every token stood at position 0."""
    keys, values = keys.float().clone(), values.float().clone()
    rotary.move(keys, values, range(keys.shape[-2]), [0] * keys.shape[-2])
    return keys, values


def _inputs(kv: Sequence[Tensor], layers: Iterable[int]) -> Tensor:
    """[T, len(layers) * H * (Dk + Dv) + 1]: keys and values of these layers, and a constant."""
    columns = [part[layer].transpose(0, 1).flatten(1) for layer in layers for part in kv]
    return torch.cat([*columns, columns[0].new_ones(len(columns[0]), 1)], 1)


def _ridge(inputs: Tensor, outputs: Tensor) -> Tensor:
    gram = inputs.T @ inputs
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, inputs.T @ outputs)


def _closest(made: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """For each layer of the target, the layer of the source that it follows from best, and that one's neighbours."""
    depth, count = made[0].shape[0], len(outputs)
    some = torch.linspace(0, made[0].shape[2] - 1, min(_SEARCHED_TOKENS, made[0].shape[2])).long()
    fitted, tested = some[0::2], some[1::2]
    chosen = []
    for index, out in enumerate(outputs):
        middle = round(index * (depth - 1) / max(1, count - 1))
        errors = {}
        for layer in range(max(0, middle - _REACH), min(depth, middle + _REACH + 1)):
            inputs = _inputs(made, (layer,))
            errors[layer] = float((inputs[tested] @ _ridge(inputs[fitted], out[fitted]) - out[tested]).norm())
        best = min(errors, key=lambda layer: errors[layer])
        chosen.append(tuple(range(max(0, best - _NEIGHBOURS), min(depth, best + _NEIGHBOURS + 1))))
    return tuple(chosen)


def _shape_of(engine: Engine) -> Shape:
    assert engine.shape is not None
    return engine.shape.layers, engine.shape.heads, engine.shape.key_dim, engine.shape.value_dim
