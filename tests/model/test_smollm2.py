"""The demo model, for real: exact without quantization, close with it, in AutoGen's own team."""

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat

from qkvshare_agents import QKVShareClient
from qkvshare_agents.eval import corpus, fitting, handoff, splice
from qkvshare_agents.host.host import Host
from qkvshare_agents.kv import page
from qkvshare_agents.kv.working_cache import KVCache
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.request import Turn


@pytest.fixture
def engine(demo_engine: Engine) -> Engine:
    return demo_engine


def test_prompt_ids_equal_the_models_own_template(engine: Engine) -> None:
    template, chat = engine.template, [("system", "You write Python."), ("user", "Write is_even(n).\n\nBe brief.")]
    expected = engine.tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in chat], add_generation_prompt=True, return_dict=False
    )
    got = template.head(chat[0][1]) + template.encoder.text(chat[1][1]) + template.turn
    assert list(got) == list(expected)


@pytest.mark.parametrize("at", [1, 64, 200, 299])
def test_injected_native_kv_continues_exactly(engine: Engine, at: int) -> None:
    assert engine.refusal is None and engine.shape is not None
    ids = corpus.tokens(engine.template.encoder, 300)
    expected = engine.feed(engine.begin(None), ids)
    source, target = KVCache(engine.shape), KVCache(engine.shape)
    engine.feed(engine.begin(source), ids[:at])
    target.load([(page.keep_native(source.span(0, at)), at)])
    got = engine.feed(engine.begin(target), ids[at:])
    assert (got - expected).abs().max() <= 1e-4


def test_8_bit_payload_and_fidelity(engine: Engine) -> None:
    result = handoff.run(tokens=2048, suffix=8, rounds=1, prompts=3, engine=engine)
    assert result["payload_bytes"] / result["native_fp16_bytes"] <= 0.53
    assert result["mean_kl"] <= 1e-3


async def _texts(engine: Engine, name: str, **settings: object) -> tuple[list[str], list]:
    client = QKVShareClient("smollm2-135m", host=name, max_tokens=40, **settings)
    client.host._engine = engine
    try:
        agents = [
            AssistantAgent("coder", client, system_message="Write the function, nothing else."),
            AssistantAgent("tester", client, system_message="Now write a test for this function."),
        ]
        task = "Write a Python function is_even(n) that returns True if n is even."
        result = await RoundRobinGroupChat(agents, max_turns=4).run(task=task)
        return [m.content for m in result.messages], client.reports
    finally:
        client.host._engine = None
        await client.close()


async def test_a_team_says_the_same_with_and_without_handoff(engine: Engine) -> None:
    native, reports = await _texts(engine, "native", precision="native")
    replayed, others = await _texts(engine, "replayed", handoff=False)
    assert native == replayed
    assert [r.mode.value for r in reports] == ["TEXT", "KV", "KV", "KV"]
    assert {r.mode.value for r in others} == {"TEXT"}
    assert sum(r.prefilled_tokens for r in reports) * 2 < sum(r.prefilled_tokens for r in others)


def test_cutting_and_splicing_are_close_and_the_controls_are_not(engine: Engine) -> None:
    cut = {r["method"]: r for r in fitting.run(tokens=384, keep=192, samples=1, positions=32, engine=engine)["rows"]}
    assert cut["drop_head"]["mean_kl"] < cut["drop_head, no sinks"]["mean_kl"] / 4
    assert cut["drop_head"]["mean_kl"] < cut["drop_head, 4 sinks, not turned"]["mean_kl"] / 4
    put = {r["method"]: r["mean_kl"] for r in splice.run(tokens=192, samples=1, positions=32, engine=engine)["rows"]}
    assert put["read anew"] < 1e-6 < put["spliced, 16 computed anew"] < 0.02
    assert put["spliced, 16 computed anew"] < put["spliced, not turned"] / 4
    assert put["spliced, not turned"] < put["without the text"]


def test_a_full_context_is_cut_on_the_real_model(engine: Engine) -> None:
    host = Host(HostSettings("smollm2-135m", context_tokens=512), engine)
    encoder, ids = engine.template.encoder, corpus.tokens(engine.template.encoder, 600)
    messages: list[Message] = []
    reports = []
    for start, stop in ((0, 300), (300, 420), (420, 470)):
        messages.append(Message("user", encoder.decode(ids[start:stop]), "user"))
        turn = Turn(host.roster.learn("", "reader", "You read."), "", tuple(messages), Sampling(max_tokens=16))
        answer = host.submit(turn).result()
        messages.append(Message("user", answer.text, "reader"))
        reports.append(answer.report)
    assert [r.mode.value for r in reports] == ["TEXT", "PARTIAL", "PARTIAL"]
    assert not reports[0].dropped_tokens and reports[1].dropped_tokens and reports[2].prefilled_tokens < 100
    assert all(r.prompt_tokens + r.generated_tokens <= 512 for r in reports)
