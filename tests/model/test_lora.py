"""LoRA adapters on one base: told apart by what they do, and KV is shared only where that was asked for."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted import ScriptedHost
from support import tiny_model, tiny_tokenizer

from qkvshare_agents.errors import InvalidSetting, PackageError
from qkvshare_agents.host.host import Host
from qkvshare_agents.model import adapters as identity
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.model.lora import adapters_leave_kv
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.request import Turn
from qkvshare_agents.wire import package
from qkvshare_agents.wire.payload import Payload

peft = pytest.importorskip("peft", reason="peft is not installed")
warnings.filterwarnings("ignore", message="Adapter name")
TASK = Message("user", "Say something long enough to fill a page or two of the cache, please, and some more.", "user")
LAST = 2  # of three layers
HARMLESS = {"ends": (["q_proj", "o_proj", "down_proj"], [LAST]), "head": (["lm_head"], None)}
HARMFUL = {
    "keys": (["k_proj"], [LAST]),
    "values": (["v_proj"], [LAST]),
    "earlier": (["q_proj"], [0]),
    "embedding": (["embed_tokens"], None),
    "all": (["q_proj"], None),
}


def config(targets: list[str], layers: list[int] | None) -> Any:
    return peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=targets, layers_to_transform=layers, init_lora_weights=False
    )


def adapted(**adapters: tuple[list[str], list[int] | None]) -> Any:
    """A tiny model with random adapters that change what it says; the first is in effect."""
    model: Any = tiny_model()
    for number, (name, how) in enumerate(adapters.items()):
        torch.manual_seed(100 + number)
        if number == 0:
            model = peft.get_peft_model(model, config(*how), adapter_name=name)
        else:
            model.add_adapter(name, config(*how))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(3.0)
    return model.eval()


def engine_of(**adapters: tuple[list[str], list[int] | None]) -> Engine:
    return Engine.of(adapted(**adapters), tiny_tokenizer(), name="tiny")


def host_of(engine: Engine, **settings: object) -> ScriptedHost:
    host = ScriptedHost(lambda prompt: f"Answer {len(prompt)} to what was asked.", engine=engine, **settings)
    for name in "ab":
        host.roster.learn("", name, f"You are {name}, and you say what {name} says.")
    return host


def say(host: ScriptedHost, name: str, messages: list[Message]) -> Any:
    turn = Turn(host.roster.members("")[name], "", tuple(messages), Sampling(max_tokens=30))
    answer = host.submit(turn).result()
    messages.append(Message("assistant", answer.text, name))
    return answer.report


# -- what a model is -------------------------------------------------------------------------------------------------


def test_the_base_is_the_base_with_adapters_loaded_and_off() -> None:
    plain = Engine.of(tiny_model(), tiny_tokenizer()).fingerprint
    engine = engine_of(one=HARMFUL["keys"], two=HARMFUL["all"])
    assert engine.refusal is None
    first = engine.fingerprint
    assert first.differences(plain) == ["lora_adapters"]
    engine.model.set_adapter("two")
    assert engine.fingerprint.differences(first) == ["lora_adapters"], "without a change to any weight"
    with engine.model.disable_adapter():
        assert engine.fingerprint == plain and plain.lora_adapters == identity.BASE
    engine.model.set_adapter("one")
    assert engine.fingerprint == first


def test_an_adapter_is_what_it_does_not_what_it_is_called() -> None:
    torch.manual_seed(0)
    same = [engine_of(**{name: HARMFUL["keys"]}).fingerprint for name in ("one", "weight", "model")]
    assert same[0] == same[1] == same[2]
    engine = engine_of(one=HARMFUL["keys"])
    next(p for n, p in engine.model.named_parameters() if "lora_B" in n).data.view(-1)[0] += 1
    assert engine.fingerprint.differences(same[0]) == ["lora_adapters"]
    scaled = engine_of(one=HARMFUL["keys"])
    module = next(m for m in scaled.model.modules() if hasattr(m, "scaling") and isinstance(m.scaling, dict))
    module.scaling["one"] *= 2
    assert scaled.fingerprint.differences(same[0]) == ["lora_adapters"]


def test_a_merged_adapter_is_another_base() -> None:
    engine = engine_of(one=HARMLESS["ends"])
    engine.model.merge_adapter()
    assert "weights" in engine.fingerprint.differences(Engine.of(tiny_model(), tiny_tokenizer()).fingerprint)
    assert not adapters_leave_kv(engine)


@pytest.mark.parametrize("name", [*HARMLESS, *HARMFUL])
def test_what_leaves_kv_alone_is_known(name: str) -> None:
    assert adapters_leave_kv(engine_of(one={**HARMLESS, **HARMFUL}[name])) == (name in HARMLESS)


def test_settings_say_what_there_is() -> None:
    with pytest.raises(InvalidSetting, match="share_base"):
        HostSettings("tiny", lora="always")  # type: ignore[arg-type]


# -- conversations ----------------------------------------------------------------------------------------------------


def switch(engine: Engine, name: str | None) -> None:
    for module in identity._adapted(engine.model):
        module._disable_adapters = name is None
    if name:
        engine.model.set_adapter(name)


@pytest.mark.parametrize("names", [("one", "two"), ("one", None), (None, "two")], ids=str)
def test_adapters_share_nothing_by_default(names: tuple[str | None, str | None]) -> None:
    engine = engine_of(one=HARMLESS["ends"], two=HARMLESS["head"])
    host, messages = host_of(engine), [TASK]
    for name, member in zip(names, "ab", strict=True):
        switch(engine, name)
        assert say(host, member, messages).mode.value == "TEXT"
    host.assert_exact()


@pytest.mark.parametrize("names", [("one", "two", None, "one"), (None, "one", "two", None)], ids=str)
def test_harmless_adapters_share_the_bases_kv_exactly(names: tuple[str | None, ...]) -> None:
    """The scripted host compares the logits behind shared KV with one forward of the adapted model."""
    engine = engine_of(one=HARMLESS["ends"], two=HARMLESS["head"])
    host, messages = host_of(engine, lora="share_base"), [TASK]
    said = []
    for name, member in zip(names, "abab", strict=True):
        switch(engine, name)
        report = say(host, member, messages)
        assert not [reason for reason in report.reasons if "LoRA" in reason]
        with torch.inference_mode():
            said.append(engine.model(input_ids=torch.tensor([[5, 6, 7]])).logits)
    assert host.modes == ["TEXT", "KV", "KV", "KV"]
    assert not torch.allclose(said[0], said[1], atol=0.1), "the adapters do change what is said"
    host.assert_exact()


@pytest.mark.parametrize("harm", HARMFUL)
def test_other_adapters_share_approximately_and_the_report_says_so(harm: str) -> None:
    engine = engine_of(one=HARMFUL[harm], two=HARMLESS["ends"])
    host, messages = host_of(engine, lora="share_base"), [TASK]
    switch(engine, None)
    say(host, "a", messages)
    switch(engine, "two")
    report = say(host, "b", messages)
    assert report.mode.value == "KV" and report.reasons == ()
    host.assert_exact()
    switch(engine, "one")
    report = say(host, "a", messages)
    assert report.mode.value == "KV"
    assert f"KV of {report.reused_tokens} tokens was computed with other LoRA adapters" in report.reasons[0]
    assert host.engine.worst > 1e-2, "it is no exact handoff"
    switch(engine, None)
    assert "other LoRA adapters" in say(host, "b", messages).reasons[0], "in part it is the adapter's"


def test_mixed_kv_does_not_leave_and_harmless_adapters_share_between_processes() -> None:
    sender, receiver = engine_of(one=HARMLESS["ends"]), engine_of(two=HARMLESS["head"])
    a, b = host_of(sender, lora="share_base"), host_of(receiver, lora="share_base")
    messages = [TASK]
    say(a, "a", messages)
    out = a.export(Turn(a.roster.members("")["b"], "", tuple(messages)))
    got = package.read(Payload([b"".join(out.write().pieces)]))
    assert b.adopt(got) == () and say(b, "b", messages).mode.value == "KV"
    b.assert_exact()
    c = host_of(engine_of(two=HARMLESS["head"]))  # by its own settings it shares nothing
    assert "lora_adapters differ" in c.adopt(package.read(Payload([b"".join(out.write().pieces)])))[0]

    mixed = engine_of(one=HARMFUL["keys"])
    d, messages = host_of(mixed, lora="share_base"), [TASK]
    say(d, "a", messages)
    switch(mixed, None)
    say(d, "b", messages)
    with pytest.raises(PackageError, match="several LoRA adapters"):
        d.export(Turn(d.roster.members("")["a"], "", tuple(messages)))


def test_transformers_own_adapters_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 asks for a peft that was not released when this was written; its own code does with 0.21."""
    check: Callable[..., None] = lambda **_: None  # noqa: E731
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", check)
    plain = Engine.of(tiny_model(), tiny_tokenizer()).fingerprint
    model: Any = tiny_model()
    torch.manual_seed(3)
    model.add_adapter(config(*HARMFUL["keys"]), adapter_name="one")
    engine = Engine.of(model, tiny_tokenizer())
    assert engine.fingerprint.differences(plain) == ["lora_adapters"]
    model.disable_adapters()
    assert engine.fingerprint == plain


# -- adapters that tokens of the prompt activate ----------------------------------------------------------------------


CALL = "<|call|>"  # in an agent's instruction, and so in its cue


def activated(kind: str = "llama", targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "down_proj")) -> Engine:
    """A tiny model with a random activated LoRA on all layers."""
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(CALL, add_special_tokens=False)
    torch.manual_seed(5)
    settings = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM",
        alora_invocation_tokens=ids,
    )  # fmt: skip
    model: Any = peft.get_peft_model(tiny_model(kind), settings, adapter_name="helper")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(3.0)
    return Engine.of(model.eval(), tokenizer, name="activated")


def judge_of(engine: Engine, **settings: object) -> ScriptedHost:
    """Agents a and b speak as the base; c's cue activates the adapter."""
    host = ScriptedHost(lambda prompt: f"Answer {len(prompt)} to what was asked.", engine=engine, **settings)
    for name in "abc":
        host.roster.learn("", name, f"You are {name}." + (f"\n{CALL} Judge it." if name == "c" else ""))
    return host


def reference(engine: Engine, ids: tuple[int, ...]) -> torch.Tensor:
    """What peft says behind a whole prompt, in one forward without a cache: it finds the tokens itself."""
    with torch.inference_mode():
        return engine.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()


def test_an_activated_adapter_is_read_as_peft_reads_it() -> None:
    """In pieces, and token by token behind the prompt as peft's own generate does."""
    engine = activated()
    call = list(identity.invocation(engine.model))
    ids = tuple([5, 6, 7, *call, 9, 10, 11, 12, *call, 13, 14])
    at = identity.active_from(engine.model, ids)
    assert at == len(ids) - 2 - len(call), "the last place counts"
    for pieces in ([len(ids)], [4, 9, len(ids)], [*range(1, len(ids) + 1)]):
        run, start = engine.begin(None), 0
        run.active_from = at
        for stop in pieces:
            logits = engine.feed(run, ids[start:stop])
            start = stop
        torch.testing.assert_close(logits, reference(engine, ids), rtol=1e-4, atol=1e-4)
    inactive = engine.begin(None)
    assert not torch.allclose(engine.feed(inactive, ids), reference(engine, ids), atol=0.1), (
        "the adapter does something"
    )
    sampled, first = [], reference(engine, ids)
    for _ in range(6):
        sampled.append(int(first.argmax()))
        first = engine.feed(run, sampled[-1:])
    generated = engine.model.generate(input_ids=torch.tensor([ids]), max_new_tokens=6, do_sample=False)
    assert generated[0, len(ids) :].tolist() == sampled


def test_generate_is_not_asked_where_it_would_not_see_the_invocation() -> None:
    engine, said = activated(), []
    for decoding in ("loop", "generate"):
        host = Host(HostSettings("tiny", precision="native", decoding=decoding), engine)
        member = host.roster.learn("", "c", f"You are c.\n{CALL} Judge it.")
        said.append(host.submit(Turn(member, "", (TASK,), Sampling(max_tokens=8))).result().text)
    assert said[0] == said[1]


@pytest.mark.parametrize("lora", ["refuse", "share_base"])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_kv_before_the_invocation_is_shared_exactly(kind: str, lora: str) -> None:
    """Every turn's logits equal one forward of peft's own over the whole prompt."""
    engine = activated(kind)
    host, messages = judge_of(engine, lora=lora), [TASK]
    worst = []
    original = host._load().runner._read

    def checked(start: Any, prompt: Any, cancelled: Any) -> torch.Tensor:
        logits = original(start, prompt, cancelled)
        behind = engine.begin(None)
        behind.active_from = identity.active_from(engine.model, prompt.ids)
        real = start.run.expected[-1]
        worst.append(float((real - reference(engine, prompt.ids)).abs().max()))
        return logits

    host._load().runner._read = checked
    reports = [say(host, member, messages) for member in "abcbca"]
    assert max(worst) < 1e-3
    assert host.prompts[2].ids != host.prompts[1].ids and identity.active_from(engine.model, host.prompts[2].ids)
    assert [r.mode.value for r in reports[:3]] == ["TEXT", "KV", "KV"], [r.reasons for r in reports]
    assert reports[2].reused_tokens == host.prompts[2].settled, "of what the others said, all"
    # what c said is read again by the others, behind KV of what came before its cue
    for report, prompt in zip(reports[3:], host.prompts[3:], strict=True):
        assert report.mode.value == "PARTIAL" and 0 < report.reused_tokens < prompt.settled
        at = identity.active_from(engine.model, prompt.ids)
        assert at is not None and report.reused_tokens <= at


def test_base_and_activated_share_in_both_directions_and_between_processes() -> None:
    plain, helper = engine_of(one=HARMLESS["ends"]), activated()
    switch(plain, None)  # the base alone
    a, c = judge_of(plain), judge_of(helper, lora="share_base")
    assert a.fingerprint == c.fingerprint
    messages = [TASK]
    say(a, "a", messages)
    out = a.export(Turn(a.roster.members("")["c"], "", tuple(messages)))
    assert c.adopt(package.read(Payload([b"".join(out.write().pieces)]))) == ()
    report = say(c, "c", messages)
    assert report.mode.value == "KV" and report.reused_tokens == out.covered_tokens and report.reasons == ()
    back = c.export(Turn(c.roster.members("")["a"], "", tuple(messages)))
    assert back.covered_tokens == identity.active_from(helper.model, c.prompts[-1].ids), "nothing of the adapter's"
    b = judge_of(plain)
    assert b.adopt(package.read(Payload([b"".join(back.write().pieces)]))) == ()
    assert say(b, "b", messages).mode.value == "PARTIAL"
    b.assert_exact()
    refusing = judge_of(helper)
    assert "lora_adapters differ" in refusing.adopt(package.read(Payload([b"".join(out.write().pieces)])))[0]


def test_an_activated_adapter_beside_a_plain_one_is_no_base() -> None:
    engine = activated()
    assert identity.activated_only(engine.model) and adapters_leave_kv(engine)
    with identity.without_adapters(engine.model):
        assert identity.invocation(engine.model) == () and identity.active_from(engine.model, [1, 2]) is None
    torch.manual_seed(6)
    engine.model.add_adapter("plain", config(*HARMFUL["keys"]))
    engine.model.base_model.set_adapter(["helper", "plain"])
    assert not identity.activated_only(engine.model) and not adapters_leave_kv(engine)


def test_state_behind_an_invocation_is_not_kept() -> None:
    from qkvshare_agents.eval.families import tiny_model as tiny_family

    tokenizer = tiny_tokenizer()
    settings = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "in_proj"], init_lora_weights=False,
        task_type="CAUSAL_LM", alora_invocation_tokens=tokenizer.encode(CALL, add_special_tokens=False),
    )  # fmt: skip
    engine = Engine.of(peft.get_peft_model(tiny_family("lfm2"), settings).eval(), tokenizer)
    assert engine.refusal is None
    host, messages = judge_of(engine, lora="share_base"), [TASK]
    for member in "abcab":
        say(host, member, messages)
    for ids in host.load().snapshots._kept:
        at = identity.active_from(engine.model, ids)
        assert at is None, "a state that has read the invocation"
    assert host.modes[:3] == ["TEXT", "KV", "KV"] and host.modes[3] == "PARTIAL"
