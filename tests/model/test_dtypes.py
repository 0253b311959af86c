"""Models in 16 bits, and models that the caller has loaded.

In 16 bits a text gives other logits when it is read in calls of other lengths, without any handoff. So a handoff is
compared with transformers' own cache after the same calls, which it must equal, and that with one call for all.
"""

from pathlib import Path

import pytest
import torch
from support import tiny_engine, tiny_model, tiny_tokenizer

from qkvshare_agents import Host, HostSettings, Sampling, Turn, forget_model, open_host, use_model
from qkvshare_agents.errors import HostConflict, InvalidSetting
from qkvshare_agents.eval import corpus, doctor, families
from qkvshare_agents.eval.packing import kl_divergence
from qkvshare_agents.host.registry import release_host
from qkvshare_agents.kv import page
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.probe import off
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.members import Member

HALF = ["float16", "bfloat16"]


def read(engine: Engine, kv: KVCache | None, *pieces: list[int]) -> torch.Tensor:
    run = engine.begin(kv)
    for piece in pieces:
        logits = engine.feed(run, piece)
    assert logits is not None
    return logits


def behind_pages(engine: Engine, ids: list[int], at: int) -> torch.Tensor:
    assert engine.refusal is None and engine.shape is not None
    source, target = KVCache(engine.shape), KVCache(engine.shape)
    engine.feed(engine.begin(source), ids[:at])
    target.load([(page.keep_native(source.span(0, at)), at)])
    return read(engine, target, ids[at:])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma3_text", "deepseek_v3", "qwen3_next", "mamba2"])
def test_families_are_exact_in_16_bits(family: str, dtype: str) -> None:
    engine = Engine.of(families.tiny_model(family).to(getattr(torch, dtype)), tiny_tokenizer())
    found = doctor.examine(engine, packed=False)
    assert doctor.is_exact(found), found
    assert engine.shape and engine.shape.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("at", [1, 64, 100])
def test_the_demo_model_goes_on_bit_for_bit_in_16_bits(demo_engine: Engine, dtype: str, at: int) -> None:
    engine = half(dtype)
    ids = corpus.tokens(engine.template.encoder, 104)
    handed_over, whole = behind_pages(engine, ids, at), read(engine, None, ids)
    assert torch.equal(handed_over, read(engine, None, ids[:at], ids[at:]))
    assert off(handed_over, whole) <= engine.tolerance
    rounding, other = (kl_divergence(whole, x) for x in (handed_over, read(engine, None, ids[::-1])))
    assert other > 50 * rounding, "another text is told from rounding"


_HALVES: dict[str, Engine] = {}


def half(dtype: str) -> Engine:
    if dtype not in _HALVES:
        _HALVES[dtype] = Engine.load("smollm2-135m", dtype=dtype)
    return _HALVES[dtype]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("asked", "found"), [("auto", "bfloat16"), ("float32", "float32"), ("float16", "float16")])
def test_the_setting_decides_and_auto_is_what_the_checkpoint_has(checkpoint: Path, asked: str, found: str) -> None:
    host = Host(HostSettings(str(checkpoint), dtype=asked))
    try:
        assert host.engine.model.dtype == getattr(torch, found)
        assert host.engine.shape and host.engine.shape.dtype == getattr(torch, found)
    finally:
        host.close()


@pytest.mark.parametrize("dtype", ["float64", "int8", "bf16", "half"])
def test_other_dtypes_are_refused_when_they_are_set(dtype: str) -> None:
    with pytest.raises(InvalidSetting, match="auto, float32, bfloat16, float16"):
        HostSettings("tiny", dtype=dtype)
    with pytest.raises(InvalidSetting, match="auto, float32, bfloat16, float16"):
        Engine.load("smollm2-135m", dtype=dtype)


def turn(text: str, *earlier: Message) -> Turn:
    return Turn(Member("a", "a", "You are a."), "", (*earlier, Message("user", text, "user")), Sampling(max_tokens=80))


def test_kv_of_another_dtype_is_refused(checkpoint: Path) -> None:
    hosts = [Host(HostSettings(str(checkpoint), dtype=dtype)) for dtype in ("float32", "bfloat16", "bfloat16")]
    try:
        answers = [host.submit(turn("Say a lot.")).result() for host in hosts]
        said = [Message("user", "Say a lot.", "user"), Message("assistant", answers[1].text, "a")]
        sent = hosts[1].export(turn("And more.", *said))
        assert "dtype" in str(hosts[0].adopt(sent)) and "weights" in str(hosts[0].adopt(sent))
        hosts[2].store.clear()
        assert hosts[2].adopt(sent) == ()
    finally:
        for host in hosts:
            host.close()


def test_a_model_that_the_caller_has_loaded_is_used_as_it_is() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    use_model("mine", model, tokenizer)
    use_model("mine", model, tokenizer)
    settings = HostSettings("mine", precision="native")
    host = open_host(settings)
    try:
        first = host.submit(turn("Say a lot.")).result()
        assert host.engine.model is model and first.report.mode == "TEXT"
        again = host.submit(turn("Say a lot.")).result()
        assert again.text == first.text and again.report.reused_tokens > 0
        assert open_host(settings) is host
        release_host(settings)
        with pytest.raises(HostConflict, match="one host can use it"):
            open_host(HostSettings("mine", precision="tiny"))
    finally:
        release_host(settings)
        forget_model("mine")
    with pytest.raises(FileNotFoundError, match="use_model"):
        Engine.load("mine")


@pytest.mark.parametrize("changed", [{"dtype": "float32"}, {"device": "cpu"}, {"device_map": "auto"}])
def test_what_is_loaded_can_not_be_loaded_in_another_way(changed: dict) -> None:
    use_model("mine", tiny_model(), tiny_tokenizer())
    try:
        with pytest.raises(InvalidSetting, match=f"{next(iter(changed))}=.* can't be changed"):
            Engine.load("mine", **changed)
    finally:
        forget_model("mine")


@pytest.mark.parametrize(
    ("name", "what"),
    [("a/b", "plain name"), ("", "plain name"), ("smollm2-135m", "another model's"), ("none", "plain name")],
)
def test_names_that_a_loaded_model_can_not_have(name: str, what: str) -> None:
    with pytest.raises(InvalidSetting, match=what):
        use_model(name, None if name == "none" else tiny_model(), tiny_tokenizer())
    use_model("taken", tiny_engine().model, tiny_tokenizer())
    try:
        with pytest.raises(InvalidSetting, match="forget_model first"):
            use_model("taken", tiny_model(), tiny_tokenizer())
    finally:
        forget_model("taken")
