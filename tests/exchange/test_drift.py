"""Handed-over KV says what its sender's said, or is not used; KV that came far is computed anew."""

import json
import math
from dataclasses import replace

import packages
import pytest
import torch
from scripted import ScriptedHost
from support import of_words, tiny_engine, tiny_model, tiny_tokenizer

from qkvshare_agents.errors import InvalidSetting, PackageError
from qkvshare_agents.eval import families
from qkvshare_agents.exchange import packages as exchange
from qkvshare_agents.host.courier import Courier
from qkvshare_agents.host.host import Host
from qkvshare_agents.host.sharing_host import SharingHost
from qkvshare_agents.kv.page import Page
from qkvshare_agents.kv.part import Part
from qkvshare_agents.kv.shape import WATCHED
from qkvshare_agents.model.canary import LIKELIEST, UNITS_PER_NAT, Canary, canary_of, default_limit, divergence
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.store.canaries import Canaries
from qkvshare_agents.transport.local import LocalTransport
from qkvshare_agents.transport.shm import ShmTransport
from qkvshare_agents.turns.report import Arrival
from qkvshare_agents.turns.request import Turn
from qkvshare_agents.wire import manifest, package
from qkvshare_agents.wire.package import Package
from qkvshare_agents.wire.payload import Payload

TASK = Message("user", "Say something long enough to fill a page or two of the cache, and then some more. " * 4, "user")
OTHER = Message("user", "def add(a, b): return a + b; def test_add(): assert add(1, 2) == 3; TERMINATE " * 4, "user")
ENGINE = Engine.of(of_words(tiny_model()), tiny_tokenizer())  # control tokens in answers are not handed over
NAMES = ("a", "b")


def host(**settings: object) -> Host:
    made = Host(HostSettings("tiny", **{"precision": "safe", "secret": "", **settings}), ENGINE)
    for name in NAMES:
        made.roster.learn("", name, f"You are {name}, and you say what {name} says.")
    return made


def turn(name: str, *messages: Message, tokens: int = 24, seed: int | None = None, **fields: object) -> Turn:
    member = host_for_members.roster.members("")[name]
    sampling = Sampling(max_tokens=tokens, seed=seed, temperature=0.0 if seed is None else 1.0)
    return Turn(member, "", messages, sampling, **fields)


def say(on: Host, name: str, messages: list[Message], **fields: object) -> list[Message]:
    answer = on.submit(turn(name, *messages, **fields)).result()
    return [*messages, Message("assistant", answer.text, name)]


def sent(task: Message = TASK, **settings: object) -> tuple[Host, list[Message], Package]:
    a = host(**settings)
    messages = say(a, "a", [task])
    return a, messages, a.export(turn("b", *messages))


def carried(out: Package) -> Package:
    return package.read(Payload([b"".join(out.write().pieces)]))


host_for_members = host()


# Canaries


def test_equal_distributions_do_not_diverge_and_others_do() -> None:
    logits = torch.randn(WATCHED, 500, generator=torch.Generator().manual_seed(1)) * 4
    canary = canary_of(logits)
    assert canary.tokens == WATCHED and {len(row) for row in canary.ids} == {LIKELIEST}
    assert abs(divergence(canary, logits)) < 1e-5
    assert divergence(canary, logits + 0.1 * torch.randn_like(logits)) < 0.05 < divergence(canary, logits.flip(1))
    assert math.isnan(divergence(canary, logits * math.nan))


def test_the_rest_of_the_vocabulary_counts_as_one_token() -> None:
    """Computed by hand: two tokens travel, the other eight are one."""
    p, q = [0.5, 0.3, *[0.025] * 8], [0.25, 0.25, *[0.0625] * 8]
    canary = Canary(((0, 1),), (tuple(round(math.log(x) * UNITS_PER_NAT) for x in p[:2]),))
    by_hand = 0.5 * math.log(2) + 0.3 * math.log(0.3 / 0.25) + 0.2 * math.log(0.2 / 0.5)
    assert divergence(canary, torch.tensor([q]).log()) == pytest.approx(by_hand, abs=1e-5)


def test_a_small_vocabulary_and_certain_tokens() -> None:
    assert divergence(canary_of(torch.zeros(1, 3)), torch.zeros(1, 3)) == pytest.approx(0, abs=1e-5)
    certain = torch.full((1, 50), -1e4)
    certain[0, 7] = 0.0
    canary = canary_of(certain)
    assert min(canary.logs[0]) == -100 * UNITS_PER_NAT
    assert divergence(canary, certain) == pytest.approx(0, abs=1e-4)
    assert divergence(canary, certain.roll(1, 1)) > 10


def test_canaries_are_found_by_exactly_their_ids() -> None:
    kept = Canaries()
    kept.keep((1, 23), canary_of(torch.zeros(2, 30)))
    assert kept.find([1, 23]) == canary_of(torch.zeros(2, 30))
    assert kept.find((12, 3)) is None and kept.find((1,)) is None
    kept.clear()
    assert kept.find((1, 23)) is None


# In the package


def test_a_package_carries_its_canary() -> None:
    _, _, out = sent()
    assert out.canary and out.canary.tokens == WATCHED
    assert carried(out).canary == out.canary


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda c: c | {"ids": [[-1, 2]]}, "canary id"),
        (lambda c: c | {"ids": [[True, 2]]}, "canary id"),
        (lambda c: c | {"ids": [[2**31, 2]]}, "canary id"),
        (lambda c: c | {"ids": [[2, 2]]}, "different ids"),
        (lambda c: c | {"logs": [[-2_000_000, -1_000_000]]}, "descending"),
        (lambda c: c | {"logs": [[-100_000, -100_000]]}, "distribution"),
        (lambda c: c | {"logs": [[1, -1]]}, "log-probability"),
        (lambda c: c | {"logs": [[-700_000, -(2**60)]]}, "log-probability"),
        (lambda c: c | {"logs": [[-700_000]]}, "different ids"),
        (lambda c: {"ids": [], "logs": []}, "at least one row"),
        (lambda c: {"ids": [[1]] * 2, "logs": [[-1]]}, "at least one row"),
        (lambda c: {"ids": [[1]] * 65, "logs": [[-1]] * 65}, "at most 64"),
        (lambda c: {"ids": [[1]] * 40, "logs": [[-1]] * 40}, "each of the 37 tokens"),
        (lambda c: {"ids": [list(range(300))], "logs": [[-9_000_000] * 300]}, "at most 256"),
        (lambda c: {"ids": [7], "logs": [7]}, "canary row"),
        (lambda c: [], "canary has"),
        (lambda c: c | {"more": 1}, "canary has"),
    ],
)
def test_canaries_that_are_none_are_refused(edit, why: str) -> None:
    canary = Canary(((4, 2),), ((-700_000, -1_000_000),))
    out = packages.package(packages.pages(packages.PRECISIONS[0]), canary=canary)
    head = package.inspect(out.write())[0]
    told = json.loads(head.metadata["manifest"])
    assert manifest.read(json.dumps(told)).canary == canary
    assert manifest.read(json.dumps(told | {"canary": None})).canary is None
    with pytest.raises(PackageError, match=why):
        manifest.read(json.dumps(told | {"canary": edit(told["canary"])}))


# At the receiver


@pytest.mark.parametrize("precision", ["native", "safe", "compact", "small", "tiny"])
@pytest.mark.parametrize("tokens", [1, 3, 24])
def test_right_kv_comes_in_and_the_report_says_how_far_it_was_off(precision: str, tokens: int) -> None:
    a, b = host(precision=precision), host(precision=precision, canary_limit=None)
    messages = say(a, "a", [TASK], tokens=tokens)
    arrival = b.take(carried(a.export(turn("b", *messages))))
    assert arrival.reasons == () and arrival.canary_nats is not None and arrival.canary_ms > 0
    say(b, "b", messages, arrival=replace(arrival, moved_bytes=1))
    (report,) = b.reports
    assert (report.mode.value, report.source, report.canary_nats) == ("KV", "a", arrival.canary_nats)
    assert abs(arrival.canary_nats) < 1e-6


def pages_of(out: Package, **changed: object) -> Package:
    return replace(out, steps=tuple(replace(step, **changed) for step in out.steps))


def on_pages(out: Package, edit) -> Package:
    return replace(out, steps=tuple(replace(step, page=edit(step.page)) for step in out.steps))


def of_other_text(out: Package) -> Package:
    """Another conversation's pages under these ids: every length and every digest is right."""
    return of_text(out, OTHER)


def of_text(out: Package, task: Message) -> Package:
    _, _, other = sent(task)
    pages = iter([step.page for step in other.steps if step.sealed] * 9)
    tail = next(step.page for step in out.steps if not step.sealed)
    steps = [replace(step, page=next(pages) if step.sealed else tail) for step in out.steps]
    return replace(out, steps=tuple(steps))


def layers_swapped(out: Package) -> Package:
    def edit(page: Page) -> Page:
        return _mapped(page, lambda tensor: tensor.flip(0).contiguous())

    return on_pages(out, edit)


def a_few_tokens_later(out: Package) -> Package:
    """The same text behind two more words: every page holds what stands some tokens before."""
    return of_text(out, replace(TASK, text=f"By the way: {TASK.text}"))


def damaged(out: Package) -> Package:
    def edit(page: Page) -> Page:
        return _mapped(page, lambda t: t ^ 0x55 if t.dtype == torch.uint8 else t)

    return on_pages(out, edit)


def one_layer_of_one_page(out: Package) -> Package:
    def edit(page: Page) -> Page:
        if page is not out.steps[0].page:
            return page
        (values,) = page.values
        codes = values.packed.codes.clone()
        codes[1] ^= 0xFF
        return replace(page, values=(replace(values, packed=replace(values.packed, codes=codes)),))

    return on_pages(out, edit)


def of_another_model(out: Package) -> Package:
    other = Host(HostSettings("tiny", secret=""), tiny_engine(seed=7))
    for name in NAMES:
        other.roster.learn("", name, f"You are {name}, and you say what {name} says.")
    other.ledger.record(out.ledger[0][0], out.ids[out.ledger[0][1] : out.ledger[0][2]])
    messages = [TASK, Message("assistant", out.ledger[0][0], "a")]
    say(other, "b", messages)
    came = other.export(turn("b", *messages))
    assert came.ids == out.ids
    pages = [page for step in came.steps if (page := step.page)]
    steps = tuple(replace(step, page=page) for step, page in zip(out.steps, pages, strict=False))
    return replace(out, steps=steps, ledger=())  # fewer tokens, which the answer is not among


def _mapped(page: Page, edit) -> Page:
    def part(p: Part) -> Part:
        if not p.packed:
            return replace(p, native=edit(p.native))
        minimum = None if p.packed.minimum is None else edit(p.packed.minimum)
        packed = replace(p.packed, codes=edit(p.packed.codes), scale=edit(p.packed.scale), minimum=minimum)
        return replace(p, native=None if p.native is None else edit(p.native), packed=packed)

    return replace(page, keys=tuple(map(part, page.keys)), values=tuple(map(part, page.values)))


LIES = [of_other_text, a_few_tokens_later, layers_swapped, damaged, one_layer_of_one_page, of_another_model]


@pytest.mark.parametrize("precision", ["safe", "compact"])
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
@pytest.mark.parametrize("secret", ["", packages.SECRET])
def test_a_well_formed_lie_is_caught_and_leaves_nothing(lie, precision: str, secret: str) -> None:
    """All digests are right: it was written that way."""
    _, messages, out = sent(precision=precision)
    b, alone = (host(precision=precision, secret=secret, handoff=handoff) for handoff in (True, False))
    came = package.read(Payload([b"".join(lie(out).write(secret=secret).pieces)]), secret=secret)
    arrival = b.take(came)
    assert arrival.alarmed and "not used" in arrival.reasons[0]
    assert b.store.page_count == 0 and b.store.held(out.ids) == ()
    assert b.ledger.find(messages[-1].text) is None
    said = say(b, "b", messages, arrival=arrival)
    (report,) = b.reports
    assert report.mode.value == "TEXT" and report.reasons[0] == arrival.reasons[0]
    assert report.canary_nats == arrival.canary_nats
    assert said == say(alone, "b", messages)


def test_a_package_without_a_canary_is_not_believed() -> None:
    _, _, out = sent()
    b = host()
    assert "no canary" in b.adopt(replace(out, canary=None))[0]
    assert b.store.page_count == 0
    ids = (*out.canary.ids[:-1], (10_000, *out.canary.ids[-1][1:]))
    assert "has not" in b.adopt(replace(out, canary=replace(out.canary, ids=ids)))[0]


def no_kv(out: Package) -> Package:
    """Noise in place of all KV, of the same kinds and sizes."""

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        if tensor.dtype == torch.uint8:
            return torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator)
        return torch.rand(tensor.shape, generator=generator).to(tensor.dtype) + 0.01

    return on_pages(out, lambda page: _mapped(page, noise))


UNLIKELY, EVEN = -100 * UNITS_PER_NAT, round(math.log(1 / 640) * UNITS_PER_NAT)
WEAK = {
    "one row of one unlikely token": Canary(((500,),), ((UNLIKELY,),)),
    "one row": Canary((tuple(range(600, 616)),), ((EVEN,) * 16,)),
    "more rows than are compared": Canary((tuple(range(600, 616)),) * 9, ((EVEN,) * 16,) * 9),
    "rows of one token": Canary(((500,),) * 4, ((EVEN,),) * 4),
    "rows of a token said often": Canary(((500,) * 16,) * 4, ((EVEN,) * 16,) * 4),
    "rows of unlikely tokens": Canary((tuple(range(600, 616)),) * 4, ((UNLIKELY,) * 16,) * 4),
    "rows of even tokens": Canary((tuple(range(600, 616)),) * 4, ((EVEN,) * 16,) * 4),
    "all tokens even": Canary((tuple(range(256)),) * 4, ((EVEN,) * 256,) * 4),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("canary", WEAK.values(), ids=WEAK)
def test_no_canary_without_the_model_speaks_for_noise(canary: Canary, dtype: torch.dtype) -> None:
    """How much a canary has to say is not its sender's choice, also where 16 bits make the limit wide."""
    _, messages, out = sent()
    engine = ENGINE if dtype == torch.float32 else Engine.of(tiny_model().to(dtype), tiny_tokenizer())
    b = Host(HostSettings("tiny", secret=""), engine)
    lie = replace(no_kv(out), canary=canary, fingerprint=b.fingerprint)
    if dtype != torch.float32:
        lie = on_pages(lie, lambda page: _mapped(page, lambda t: t.to(dtype) if t.dtype == torch.float32 else t))
    assert b.adopt(lie) and b.store.page_count == 0
    assert b.ledger.find(messages[-1].text) is None


def test_what_a_canary_does_not_name_was_no_likelier_than_what_it_names() -> None:
    """By hand: four tokens, the canary names the third with 0.1; the receiver expects the first with 0.7."""
    canary = Canary(((2,),), (round(math.log(0.1) * UNITS_PER_NAT),))
    canary = replace(canary, logs=((canary.logs[0],),))
    q = torch.tensor([[0.7, 0.1, 0.15, 0.05]])
    # a third of 0.9 is more than 0.1: of the three others each had at most 0.1, and "all others" the rest
    by_hand = 0.1 * math.log(0.1 / 0.15) + 0.1 * math.log(0.1 / 0.7) + 0.1 * math.log(0.1 / 0.1)
    assert divergence(canary, q.log()) > by_hand
    assert divergence(canary, q.log()) > 0.9 * math.log(0.9 / 0.85) + 0.1 * math.log(0.1 / 0.15)


@pytest.mark.parametrize("seed", range(5))
def test_a_divergence_is_never_more_than_that_of_all_tokens(seed: int) -> None:
    """Right KV gets no alarm because a canary names some tokens only."""
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = (torch.randn(WATCHED, 300, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    for mine in (theirs, ours + theirs, theirs + 0.01 * ours):
        p, q = theirs.log_softmax(-1), mine.log_softmax(-1)
        whole = float((p.exp() * (p - q)).sum(-1).mean())
        assert -1e-6 <= divergence(canary_of(theirs), mine) <= whole + 1e-5


def test_the_width_of_what_came_does_not_widen_the_limit(monkeypatch) -> None:
    """Only the receiver's own pages do: a sender would choose them."""
    _, _, out = sent(precision="tiny")
    b = host(precision="safe")
    say(b, "a", [replace(TASK, text=TASK.text[:200])])
    say(b, "a", [TASK])
    b.store.resize(b.store.match(out.ids).pages[0].nbytes)  # the rest is evicted
    b.store.resize(2**30)
    here = b.store.held(out.ids)
    steps = tuple(replace(step, page=None) if step.key in here else step for step in out.steps)
    asked: list[set[int]] = []
    monkeypatch.setattr(exchange, "default_limit", lambda _, widths, **__: asked.append(set(widths)) or math.inf)
    assert here and b.take(carried(replace(out, steps=steps))).reasons == ()
    assert asked == [{8}]


def test_the_limit_can_be_set_and_switched_off() -> None:
    _, _, out = sent(precision="tiny")
    wrong = of_other_text(out)
    assert host().take(carried(wrong)).alarmed
    assert host(canary_limit=100.0).take(carried(wrong)).reasons == ()
    assert host(canary_limit=math.inf).take(carried(wrong)) == Arrival()
    assert sent(canary_limit=math.inf)[2].canary is None
    for name in ("canary_limit", "coarse_limit"):
        for limit in (0.0, -1.0, math.nan):
            with pytest.raises(InvalidSetting, match=name):
                HostSettings("tiny", **{name: limit})


def test_what_is_here_is_not_doubted_again() -> None:
    """A package that brings nothing new is not compared; pages that it leaves out count with those it brings."""
    a, messages, out = sent()
    b = host()
    assert b.take(carried(out)).canary_nats is not None
    assert b.take(carried(a.export(turn("b", *messages)))).canary_nats is None
    longer = say(a, "a", [*messages, Message("user", "Go on. " * 40, "user")])
    more = a.export(turn("b", *longer), have=b.store.held(out.ids))
    assert any(step.page is None for step in more.steps)
    arrival = b.take(carried(more))
    assert arrival.reasons == () and arrival.canary_nats is not None
    alarmed = host()
    assert "came over" in alarmed.adopt(carried(more))[0] and alarmed.store.page_count == 0


def test_forwarded_kv_keeps_its_first_canary() -> None:
    _, messages, out = sent(precision="tiny")
    b, c = host(), host()
    b.adopt(carried(out))
    forwarded = b.export(turn("b", *messages))
    assert forwarded.canary == out.canary
    assert c.adopt(carried(forwarded)) == ()


def test_where_no_turn_ended_the_canary_is_computed() -> None:
    """The next agent sees less of the answer than was generated."""
    a = host(precision="native")
    messages = say(a, "a", [TASK])
    out = a.export(turn("b", TASK, replace(messages[-1], text=messages[-1].text[:20])))
    assert out.canary and out.canary.tokens == WATCHED
    assert a.load().canaries.find(out.ids) is None
    assert host().adopt(carried(out)) == ()


def test_own_pages_have_their_own_rounding() -> None:
    """Where the receiver has read some of the text itself, its pages are not the sender's, and the limit is wider."""
    _, _, out = sent(precision="compact")
    b = host(precision="compact")
    edited = replace(TASK, text=TASK.text[:200])
    say(b, "a", [edited])
    say(b, "a", [TASK])  # whatever it answers: its first page stays
    b.store.resize(b.store.match(out.ids).pages[0].nbytes)  # the rest is evicted
    b.store.resize(2**30)
    here = b.store.held(out.ids)
    assert here
    steps = tuple(replace(step, page=None) if step.key in here else step for step in out.steps)
    arrival = b.take(carried(replace(out, steps=steps)))
    assert arrival.reasons == () and arrival.canary_nats is not None


def test_default_limits() -> None:
    assert default_limit(torch.float32) < default_limit(torch.bfloat16)
    assert default_limit(torch.float32) < default_limit(torch.float32, {8}) < default_limit(torch.float32, {8, 4})
    assert default_limit(torch.float32, set()) == default_limit(torch.float32)


# Wider pages


def couriers(**settings: object) -> tuple[Courier, Courier, Host, Host]:
    a, b = host(precision="tiny", **settings), host(precision="tiny")
    transport = LocalTransport()
    return Courier(a, transport, deadline_ms=9999), Courier(b, transport, deadline_ms=9999), a, b


def bits(runs) -> set[int]:
    return {part.packed.bits for page, _ in runs for part in page.parts if part.packed}


def test_kv_that_is_too_coarse_leaves_in_more_bits() -> None:
    sender, receiver, a, b = couriers(coarse_limit=1e-6)
    messages = say(a, "a", [TASK])
    arrival = receiver.receive(sender.send(turn("b", *messages)).key)
    assert arrival.reasons == ()
    ids = a.prompt(turn("b", *messages)).ids
    assert bits(a.store.match(ids).runs) == {3, 2} and bits(b.store.match(ids).runs) == {8}
    say(b, "b", messages, arrival=arrival)
    assert b.reports[0].mode.value == "KV"


def test_kv_that_is_too_coarse_stays_when_nothing_wider_is_left() -> None:
    sender, receiver, a, b = couriers(coarse_limit=1e-6)
    messages = say(a, "a", [TASK])
    say(a, "a", [OTHER])
    sent = sender.send(turn("b", *messages))
    assert sent.key == "" and "another turn ran" in sent.reasons[0]
    say(b, "b", messages, arrival=receiver.receive(sent.key))
    assert b.reports[0].mode.value == "TEXT" and "sent no KV" in b.reports[0].reasons[0]


def test_on_alarm_the_sender_is_asked_for_wider_pages() -> None:
    sender, receiver, a, b = couriers()
    messages = say(a, "a", [TASK])
    following = turn("b", *messages)
    sender.post(damaged(a.export(following)), "k" * 32)
    arrival = receiver.receive("k" * 32, ask=lambda: sender.send(following, wider=True).key)
    assert not arrival.alarmed and arrival.canary_nats < 1e-5
    assert "not used" in arrival.reasons[0] and "wider pages were asked for" in arrival.reasons[1]
    assert bits(b.store.match(a.export(following).ids).runs) == {8}
    say(b, "b", messages, arrival=arrival)
    assert (b.reports[0].mode.value, b.reports[0].reasons) == ("KV", arrival.reasons)


def test_a_second_alarm_is_text() -> None:
    sender, receiver, a, b = couriers()
    messages = say(a, "a", [TASK])
    following = turn("b", *messages)
    for key in ("k" * 32, "l" * 32):
        sender.post(damaged(a.export(following)), key)
    arrival = receiver.receive("k" * 32, ask=lambda: "l" * 32)
    assert arrival.alarmed and len(arrival.reasons) == 2 and b.store.page_count == 0
    say(b, "b", messages, arrival=arrival)
    assert b.reports[0].mode.value == "TEXT"


def test_a_sender_that_can_not_be_asked_is_text() -> None:
    sender, receiver, a, b = couriers()
    messages = say(a, "a", [TASK])
    sender.post(damaged(a.export(turn("b", *messages))), "k" * 32)

    def ask() -> str:
        raise ConnectionError("a secret address")

    arrival = receiver.receive("k" * 32, ask=ask)
    assert arrival.alarmed and arrival.reasons[1] == "the sender could not be asked for wider pages: ConnectionError"
    say(b, "b", messages, arrival=arrival)
    assert b.reports[0].mode.value == "TEXT"


def test_wider_pages_of_safe_ones_are_native() -> None:
    a, messages, out = sent(precision="safe")
    wider = carried(a.export(turn("b", *messages), wider=True))
    assert not any(part.packed for step in wider.steps for part in step.page.parts) and wider.ids == out.ids
    assert host().adopt(wider) == ()
    native = host(precision="native")
    with pytest.raises(PackageError, match="as it was computed"):
        native.export(turn("b", *say(native, "a", [TASK])), wider=True)


def test_a_host_that_finds_kv_by_itself_does_not_use_wrong_kv(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("qkvshare_agents.transport.shm.default_directory", lambda: tmp_path / "packages")
    settings = HostSettings("tiny", secret="", share="shm")
    a, b = SharingHost(settings, ENGINE), SharingHost(settings, ENGINE)
    for one in (a, b):
        for name in NAMES:
            one.roster.learn("", name, f"You are {name}, and you say what {name} says.")
    messages = say(a, "a", [TASK])
    transport = ShmTransport()
    (file,) = transport.files()
    published = package.read(transport.get(file.key))
    transport.delete(file.key)
    transport.put(file.key, layers_swapped(published).write())
    say(b, "b", messages)
    (report,) = b.reports
    assert report.mode.value == "TEXT" and "not used" in report.reasons[0] and report.canary_nats > 1e-3
    for one in (a, b, transport):
        one.close()


# Hops and refresh


def test_hops_count_handoffs_within_a_process() -> None:
    one = host()
    messages = [TASK]
    for name in "abab":
        messages = say(one, name, messages)
    assert [report.hops for report in one.reports] == [0, 1, 2, 3]


def test_hops_count_handoffs_between_processes_once() -> None:
    sides, messages = (host(), host()), [TASK]
    arrival = Arrival()
    for hop in range(6):
        here, there, name = sides[hop % 2], sides[1 - hop % 2], NAMES[hop % 2]
        messages = say(here, name, messages, arrival=arrival)
        assert here.reports[-1].hops == hop
        out = here.export(turn(NAMES[1 - hop % 2], *messages))
        arrival = replace(there.take(carried(out)), moved_bytes=1)
        assert arrival.reasons == ()


@pytest.mark.parametrize("precision", ["safe", "tiny"])
def test_refresh_computes_far_travelled_kv_anew(precision: str) -> None:
    one = host(precision=precision, refresh_every=3)
    messages = [TASK]
    for index in range(9):
        messages = say(one, NAMES[index % 2], messages)
    assert [report.hops for report in one.reports] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [report.mode.value for report in one.reports] == ["TEXT", "KV", "KV", "KV", "TEXT", "KV", "KV", "KV", "TEXT"]
    assert all("refresh_every=3" in one.reports[i].reasons[0] for i in (4, 8))
    ids = one.prompt(turn("b", *messages)).ids
    assert {page.hops for page, _ in one.store.match(ids).runs} == {0}


def test_fifty_hops_are_refreshed_every_eight() -> None:
    """What a refreshed turn says is what text replay says, however long the conversation is."""
    one = host(precision="small", refresh_every=8, measure_replay=True)
    messages = [TASK]
    for index in range(50):
        messages = say(one, NAMES[index % 2], messages, tokens=6, seed=index)  # no two answers are the same
    reports = list(one.reports)
    assert [report.hops for report in reports] == [index % 9 for index in range(50)]
    assert max(report.replay_kl for report in reports if report.hops == 0) < 1e-9
    drifted = [report.replay_kl for report in reports if report.hops]
    assert max(drifted[-8:]) < 10 * max(drifted[:8])


def test_refreshed_kv_is_that_of_text_replay() -> None:
    """Bit for bit: the same tokens, read at once, sealed anew in place of the old pages."""
    one, fresh = host(precision="tiny", refresh_every=2), host(precision="tiny")
    messages = [TASK]
    for index in range(3):
        messages = say(one, NAMES[index % 2], messages)
    prompt = one.prompt(turn("b", *messages))
    say(one, "b", messages)
    for text in (m.text for m in messages[1:]):
        fresh.ledger.record(text, one.ledger.find(text))
    assert fresh.prompt(turn("b", *messages)).ids == prompt.ids
    say(fresh, "b", messages)
    ids = prompt.ids[: len(prompt.ids) // 64 * 64]
    kvs = []
    for which in (one, fresh):
        kv = which._load().runner._working.emptied(len(ids))
        kv.load(which.store.match(ids).runs)
        kvs.append([part.clone() for b in kv.span(0, kv.tokens).blocks for part in (b.keys, b.values)])
    assert kvs[0][0].shape == kvs[1][0].shape
    for mine, theirs in zip(*kvs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-2)


@pytest.mark.parametrize("family", ["jamba", "mamba"])
def test_refresh_reads_recurrent_state_anew(family: str) -> None:
    engine = Engine.of(families.tiny_model(family), tiny_tokenizer())
    one = ScriptedHost(lambda prompt: f"Answer {len(prompt)}, in some words.", engine=engine, refresh_every=2)
    for name in NAMES:
        one.roster.learn("", name, f"You are {name}, and you say what {name} says.")
    messages = [TASK]
    for index in range(5):
        messages = say(one, NAMES[index % 2], messages)
    assert one.modes == ["TEXT", "KV", "KV", "TEXT", "KV"], [r.reasons for r in one.reports]
    assert [report.hops for report in one.reports] == [0, 1, 2, 0, 1]
    one.assert_exact()


def test_a_branch_of_refreshed_pages_is_refreshed_once() -> None:
    """The prompts part inside a page: the branch's slice must not bring the old page back."""
    one = host(refresh_every=2)
    messages = [TASK]
    for index in range(3):
        messages = say(one, NAMES[index % 2], messages)
    edited = [*messages[:-1], replace(messages[-1], text=messages[-1].text[:30])]
    for index in range(5):
        edited = say(one, NAMES[(index + 1) % 2], edited)
    assert [report.hops for report in list(one.reports)[3:]] == [0, 1, 2, 0, 1]


def test_settings_of_hops_are_checked() -> None:
    with pytest.raises(InvalidSetting, match="refresh_every"):
        HostSettings("tiny", refresh_every=-1)
