"""Looks on while a model's attention runs, and takes the measurements of `sensitivity` from it.

Few rows of the attention's arguments are looked at, and calls that are not observed (all of decoding) run as ever.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qkvshare_agents.budget.sensitivity import Seen, Unit, measure
from qkvshare_agents.kv.page import Precision
from qkvshare_agents.model.attention_hook import KNOWN, configs_of, looking, native, original, visible

FEWEST_TOKENS = 128  # a call with fewer is not observed: it says little
# Tokens that are read between two observations, so that looking takes at most 3 % of reading
TOKENS_BETWEEN = 768
_ROWS = 8
_KNOWN = [
    ours + name for name in KNOWN for ours in ("", "qkvshare_metered_")
]  # also with a look at what tokens receive
# Arguments that change what softmax sees or sums to, and that `sensitivity` knows nothing of
_FOREIGN = ("s_aux", "position_bias", "softcap")
_current = threading.local()


class Observer:
    """Observes the attention of one model. Not thread-safe: one forward at a time, as on a host.

    refusal: why nothing can be observed, or None. calls: how many forwards were observed.
    """

    def __init__(self, model: PreTrainedModel, layers: int, precision: Precision) -> None:
        self._model, self._layers = model, layers
        self._precision = precision
        self._configs = configs_of(model)
        self._implementation = ""
        self._names = {id(module): name for name, module in model.named_modules()}
        self._gains: dict[int, Tensor | None] = {}
        self._sizes: dict[str, dict[str, Tensor]] = {}
        self._output: tuple[str, Tensor] | None = None
        self._visible: dict[tuple[int, int, torch.device, int | None], tuple[Tensor, Tensor]] = {}
        self._found: dict[int, tuple[Tensor, str]] = {}
        self._units: list[Unit] | None = None
        self._read_tokens = TOKENS_BETWEEN  # since the last observation; the first one comes at once
        self.calls = 0
        self.refusal: str | None = None

    @contextmanager
    def watching(self, tokens: int, left: int = 0) -> Iterator[None]:
        """Observe the forward inside, which reads `tokens` tokens, if it is a prompt's last long one and it is time.

        left: how many tokens the prompt's further forwards will read.
        """
        self._read_tokens += tokens
        if self.refusal or tokens < FEWEST_TOKENS or left >= FEWEST_TOKENS or self._read_tokens < TOKENS_BETWEEN:
            yield
            return
        self._implementation = str(self._model.config._attn_implementation)
        if self._implementation not in _KNOWN:
            self.refusal = f"attention {self._implementation!r} is not observed; eager and sdpa are"
            yield
            return
        self._found.clear()
        self._sizes.clear()
        self._visible.clear()
        handles = list(self._listen())
        _current.observer = self
        try:
            with looking(self._configs, self._implementation, f"qkvshare_observed_{self._implementation}", _attend):
                yield
        finally:
            for handle in handles:
                handle.remove()
            _current.observer = self._output = None
        self._read_tokens = 0
        self._conclude()

    def take(self) -> list[Unit] | None:
        """What the last observed forward said of each layer with KV, once; None if there is nothing new."""
        units, self._units = self._units, None
        return units

    def original(self, module: nn.Module) -> Callable[..., Any]:
        """The attention function that the model would call without us."""
        return original(module, self._implementation)

    def see(
        self, module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
    ) -> None:
        """One layer's call: query [1, HQ, n, Dk], keys [1, H, T, Dk], values [1, H, T, Dv]."""
        n, tokens = query.shape[2], keys.shape[2]
        step = n // _ROWS
        rows = slice(n - 1 - step * (_ROWS - 1), n, step)
        place = (n, tokens, query.device, None if mask is None else mask.data_ptr())
        if place not in self._visible:  # the same for all layers of a kind
            looked_at = torch.arange(n, device=query.device)[rows]
            self._visible[place] = looked_at + tokens - n, visible(mask, looked_at, n, tokens)
        positions, shown = self._visible[place]
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        seen = Seen(query[0, :, rows], keys[0], values[0], shown, positions, scaling)
        layer = int(getattr(module, "layer_idx", len(self._found)))
        gain = self._gain(layer, module, query.shape[1], values.shape[-1])
        block = self._names.get(id(module), "").rpartition(".")[0]
        self._found[layer] = self._measured(seen, n, gain), block

    def _measured(self, seen: Seen, newest: int, gain: Tensor | None) -> Tensor:
        p, factors = self._precision, None
        if p.balance and p.rotate_keys is not False:
            factors = p.balance.factors((len(self._found),), seen.keys.shape[0], seen.keys.device)[0]
        return measure(
            seen,
            newest,
            rotate_keys=p.rotate_keys is not False,
            sinks=p.num_sink_tokens,
            page_size=p.page_size,
            gain=gain,
            factors=factors,
        )

    def _conclude(self) -> None:
        if self.refusal or len(self._found) != self._layers:
            self.refusal = self.refusal or f"attention of {len(self._found)} of {self._layers} layers was seen"
            return
        found = [self._found[layer] for layer in sorted(self._found)]
        measured = _stacked([numbers for numbers, _ in found])
        shares = [self._share(block) for _, block in found]
        if all(share is not None for share in shares):
            measured = measured * _stacked([share for share in shares if share is not None])[:, None]
        units = [Unit(*numbers) for numbers in measured.tolist()]
        if bool(measured.isfinite().all()):
            self._units = units
            self.calls += 1

    def _listen(self) -> Iterator[Any]:
        """Hooks that note how long the residual stream is, the attention's output, and what of it joins the stream."""
        parents = {name.rpartition(".")[0] for name, m in self._model.named_modules() if hasattr(m, "layer_idx")}
        for name in parents - {""}:
            block = self._model.get_submodule(name)
            yield block.register_forward_pre_hook(partial(self._note_stream, name), with_kwargs=True)
            for child in block.children():
                yield child.register_forward_hook(partial(self._note_output, name, hasattr(child, "layer_idx")))

    def _note_stream(self, block: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, Tensor) and hidden.dim() == 3:
            self._sizes[block] = {"stream": _square_length(hidden)}

    def _note_output(self, block: str, is_attention: bool, module: nn.Module, args: Any, output: Any) -> None:
        """Some models normalise the attention's output before it joins the stream: whoever gets this very tensor."""
        given = output[0] if isinstance(output, tuple) else output
        if block not in self._sizes or not isinstance(given, Tensor) or given.dim() != 3:
            return
        if is_attention:
            self._output = block, given
            self._sizes[block]["output"] = self._sizes[block]["joining"] = _square_length(given)
        elif self._output and self._output[0] == block and args and args[0] is self._output[1]:
            self._sizes[block]["joining"] = _square_length(given)

    def _share(self, block: str) -> Tensor | None:
        """What makes squared errors of the attention's output shares of the stream behind the block."""
        sizes = self._sizes.get(block, {})
        if sizes.keys() != {"stream", "output", "joining"}:
            return None
        blocks = list(self._sizes)
        behind = blocks[blocks.index(block) + 1 :]
        stream = self._sizes[behind[0]]["stream"] if behind else sizes["stream"] + sizes["joining"]
        return sizes["joining"] / (sizes["output"] * stream)

    def _gain(self, layer: int, module: nn.Module, heads: int, dim: int) -> Tensor | None:
        """[HQ]: mean square of each head's columns of the output projection, times its rows: what a unit error adds
        to the stream; None where the projection isn't found."""
        if layer not in self._gains:
            self._gains[layer] = None
            for child in module.children():  # the output projection is the last of them
                weight = getattr(child, "weight", None)
                if isinstance(weight, Tensor) and weight.dim() == 2 and heads * dim in weight.shape:
                    inputs = 1 if isinstance(child, nn.Linear) else 0  # gpt2 stores [in, out]
                    if weight.shape[inputs] == heads * dim:
                        squares = weight.detach().float().square().sum(1 - inputs)
                        self._gains[layer] = squares.view(heads, dim).mean(1)
        return self._gains[layer]


def _square_length(hidden: Tensor) -> Tensor:
    """Mean over a few tokens of [1, n, D], none of them the first: a sink may be very long."""
    rows = hidden[0, :: -(-hidden.shape[1] // _ROWS)][1:].float()
    return rows.square().sum() / len(rows)


def _attend(
    module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, **options: Any
) -> Any:
    """The model's own attention; then the observer looks."""
    observer: Observer = _current.observer
    output = observer.original(module)(module, query, key, value, attention_mask, **options)
    foreign = [name for name in _FOREIGN if options.get(name) is not None]
    key, value = native(key, value)
    if foreign:
        observer.refusal = f"attention with {', '.join(foreign)} is not observed"
    elif query.shape[0] == 1 and query.shape[2] > 1 and not observer.refusal:
        observer.see(module, query, key, value, attention_mask, options.get("scaling"))
    return output


def _stacked(found: list[Tensor]) -> Tensor:
    """Of all layers, whatever device they are on; on the CPU."""
    return torch.stack([numbers.cpu() for numbers in found])
