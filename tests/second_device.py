"""A second device for tests: tensors in CPU memory that say they are elsewhere, and refuse to meet those that are not.

Run in a process of its own (`test_devices`), since a device can't be taken back.
"""

import itertools
from typing import Any

import torch
from support import tiny_model, tiny_tokenizer
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from qkvshare_agents import Host, HostSettings, Sampling, Turn
from qkvshare_agents.kv import page
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.members import Member
from qkvshare_agents.wire.package import read
from qkvshare_agents.wire.payload import Payload

_setup_privateuseone_for_python_backend("second")
SECOND, CPU = torch.device("second:0"), torch.device("cpu")
_COPIES = ("copy_", "_to_copy")


class Elsewhere(Tensor):
    """Wraps a CPU tensor; an operation on it and on a tensor that is not wrapped is an error, as between GPUs."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "Elsewhere":
        strides, offset = raw.stride(), raw.storage_offset()
        made = Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=strides, storage_offset=offset, dtype=raw.dtype, device=SECOND
        )
        made.raw = raw
        return made

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> Any:
        return self.raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name not in _COPIES and any(not isinstance(x, Elsewhere) and x.dim() for x in tensors):
            raise RuntimeError(f"{func}: tensors of two devices")
        target = kwargs.get("device")
        if target is not None:
            kwargs["device"] = CPU
        inner, options = pytree.tree_map(lambda x: x.raw if isinstance(x, Elsewhere) else x, (args, kwargs))
        out = func(*inner, **options)
        if func._schema.is_mutable and name.endswith("_"):
            return args[0]
        if target is not None and torch.device(target).type != "second":
            return out
        ours = [x for x in tensors if isinstance(x, Elsewhere)]
        with torch.inference_mode(all(x.is_inference() for x in ours) if ours else torch.is_inference_mode_enabled()):
            return pytree.tree_map(lambda x: Elsewhere(x) if isinstance(x, Tensor) else x, out)


def _empty(size: Any, dtype: Any = None, **_: Any) -> Tensor:
    return Elsewhere(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, **_: Any) -> Tensor:
    return Elsewhere(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    getattr(target, "raw", target).copy_(getattr(source, "raw", source))
    return target


LIBRARY = torch.library.Library("aten", "IMPL")
LIBRARY.impl("empty.memory_format", _empty, "PrivateUse1")
LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")


def moved(value: Any, place: torch.device) -> Any:
    return pytree.tree_map(lambda x: x.to(place) if isinstance(x, Tensor) else x, value)


def engine(*layers: int) -> Engine:
    """The tiny model with `layers` on the second device, fed as accelerate's hooks do."""
    model = tiny_model()
    model.set_attn_implementation("eager")
    for layer in (model.model.layers[i] for i in layers):
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(parameter.detach().to(SECOND), requires_grad=False)
        layer.register_forward_pre_hook(lambda _, a, k: (moved(a, SECOND), moved(k, SECOND)), with_kwargs=True)
        layer.register_forward_hook(lambda _, a, out: moved(out, CPU))
    return Engine.of(model, tiny_tokenizer())


def behind_pages(engine: Engine, ids: list[int], at: int, precision: page.Precision) -> Tensor:
    assert engine.shape
    source, target = KVCache(engine.shape), KVCache(engine.shape)
    engine.feed(engine.begin(source), ids[:at])
    target.load([(page.seal(source.span(0, at), precision, starts_sequence=True), at)])
    logits = engine.feed(engine.begin(target), ids[at:])
    assert logits is not None
    return logits


def turn(*messages: Message) -> Turn:
    return Turn(Member("a", "a", "You are a."), "", messages, Sampling(max_tokens=90))


def talk(one: Host, other: Host) -> tuple[str, str, int]:
    """What both say to the same, the second behind the first one's KV, and how many tokens of that it used."""
    task = Message("user", "Say a lot.", "user")
    answer = one.submit(turn(task)).result()
    more = turn(task, Message("assistant", answer.text, "a"), Message("user", "And more.", "user"))
    assert other.take(read(Payload([b"".join(one.export(more).write().pieces)])), ("a",)).reasons == ()
    answers = one.submit(more).result().text, other.submit(more).result().text
    return *answers, other.reports[-1].reused_tokens


def main() -> None:
    try:
        torch.ones(2, device=SECOND) + torch.ones(2)
    except RuntimeError as error:
        assert "two devices" in str(error)
    else:
        raise AssertionError("tensors of two devices may not meet")
    whole, split = engine(), engine(1)
    assert split.refusal is None, split.refusal
    assert split.devices == {CPU, SECOND} and split.shape
    assert [group.layers for group in split.shape.groups] == [(0, 2), (1,)]
    assert split.fingerprint == whole.fingerprint
    ids = torch.randint(3, 600, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    for name, precision in page.PRESETS.items():
        assert torch.equal(*(behind_pages(e, ids, 64, precision) for e in (split, whole))), name
    ways: list[dict[str, Any]] = [
        {"precision": "native"}, {"precision": "safe", "packed_history": True}, {"precision": "joint"},
    ]  # fmt: skip
    placements: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((0, 2), (1,)), ((1,), ()), ((), (1, 2))]
    for way, senders in itertools.product(ways, placements):
        hosts = [Host(HostSettings("tiny", **way), engine(*layers)) for layers in senders]
        said, heard, reused = talk(*hosts)
        assert said == heard and reused > 64, (way, senders, said, heard, reused)
        assert hosts[0].load().uniform_because == ""
        for host in hosts:
            host.close()
    print("equal")


if __name__ == "__main__":
    main()
