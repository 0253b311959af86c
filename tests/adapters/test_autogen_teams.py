"""Inside AutoGen's own teams. Words are scripted, KV is real, and every turn is checked against one forward over
its whole prompt (`ScriptedHost.assert_exact`)."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator

import pytest
from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.teams import (
    DiGraphBuilder,
    GraphFlow,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_agentchat.tools import AgentTool
from autogen_core import CancellationToken
from autogen_core.memory import ListMemory, MemoryContent, MemoryMimeType
from autogen_core.model_context import BufferedChatCompletionContext
from scripted import ScriptedHost, install, uninstall
from support import tiny_engine

from qkvshare_agents import QKVShareClient

CODE = "def add(a, b):\n    return a + b\n\nThat adds two numbers, whatever they are, and returns their sum."
TEST = "def test_add():\n    assert add(1, 2) == 3\n\nThat test is enough for a function of one line."


def speaker(prompt: str) -> str:
    """The last cue of a relay prompt: who is asked."""
    names = re.findall(r"\[(\w+)\]", prompt.rsplit("<|im_start|>user", 1)[1])
    return names[-1] if names else ""


def coder_and_tester(prompt: str) -> str:
    return CODE if speaker(prompt) == "coder" else TEST


@pytest.fixture
def make() -> Iterator:
    made: list[str] = []

    def client(script=coder_and_tester, name: str = "teams", members=None, **settings) -> QKVShareClient:
        engine, host_settings = settings.pop("engine", None), {k: v for k, v in settings.items() if k != "max_tokens"}
        install(ScriptedHost(script, engine=engine, **host_settings), name)
        made.append(name)
        return QKVShareClient("scripted", host=name, members=members, **{"precision": "native", **settings})

    yield client
    for name in made:
        uninstall(name)


def pair(client: QKVShareClient, **options) -> list[AssistantAgent]:
    return [
        AssistantAgent("coder", client, system_message="You write Python functions.", **options),
        AssistantAgent("tester", client, system_message="You write a test for the function above.", **options),
    ]


def assert_each_prompt_extends_the_last(host: ScriptedHost) -> None:
    for earlier, later in zip(host.prompts, host.prompts[1:], strict=False):
        assert later.ids[: len(earlier.ids)] == earlier.ids


async def test_round_robin_hands_everything_over(make) -> None:
    client = make()
    result = await RoundRobinGroupChat(pair(client), max_turns=6).run(task="Write add(a, b).")
    assert [m.content for m in result.messages[1:]] == [CODE, TEST] * 3
    host = client.host
    assert host.modes == ["TEXT", "KV", "KV", "KV", "KV", "KV"]
    assert [r.source for r in host.reports] == ["", "coder", "tester", "coder", "tester", "coder"]
    assert_each_prompt_extends_the_last(host)
    host.assert_exact()
    total, prefilled = sum(r.prompt_tokens for r in host.reports), sum(r.prefilled_tokens for r in host.reports)
    assert prefilled < total / 4
    assert host.texts[2].count("You write Python functions.") == 2, "each of its cues carries the instruction"


async def test_stock_layout_reuses_each_agents_own_prefix(make) -> None:
    client = make(
        lambda p: CODE if p.startswith("<|im_start|>system\nYou write Python functions.") else TEST, layout="stock"
    )
    result = await RoundRobinGroupChat(pair(client), max_turns=6).run(task="Write add(a, b).")
    assert [m.content for m in result.messages[1:]] == [CODE, TEST] * 3
    host = client.host
    assert host.modes == ["TEXT", "TEXT", "KV", "KV", "KV", "KV"]
    assert [r.source for r in host.reports][2:] == ["coder", "tester", "coder", "tester"]
    host.assert_exact()
    assert sum(r.prefilled_tokens for r in host.reports) < sum(r.prompt_tokens for r in host.reports) * 2 / 3


async def test_8_bit_team_stays_close_and_small(make) -> None:
    client = make(precision="safe")
    await RoundRobinGroupChat(pair(client), max_turns=6).run(task="Write add(a, b).")
    assert client.host.modes[1:] == ["KV"] * 5
    assert 0 < client.host.engine.worst < 0.5
    assert list(client.host.reports)[-1].payload_ratio < 1.0


async def test_termination_and_a_second_run_continue_from_kv(make) -> None:
    client = make(lambda p: "done TERMINATE" if "That test" in p else coder_and_tester(p))
    team = RoundRobinGroupChat(pair(client), termination_condition=TextMentionTermination("TERMINATE"))
    result = await team.run(task="Write add(a, b).")
    assert result.stop_reason and "TERMINATE" in result.stop_reason
    await team.run(task="Once more.")
    assert client.host.modes == ["TEXT", "KV", "KV", "KV"]
    client.host.assert_exact()


async def test_reset_starts_over_with_the_same_prefix(make) -> None:
    client = make()
    team = RoundRobinGroupChat(pair(client), max_turns=2)
    await team.run(task="Write add(a, b).")
    await team.reset()
    await team.run(task="Write add(a, b).")
    # the roster knows the team, so the same task lays out the same ids and even the first turn finds them
    assert client.host.prompts[2] == client.host.prompts[0]
    assert all(r.reused_tokens >= r.prompt_tokens - 1 for r in list(client.host.reports)[2:])
    await team.reset()
    await team.run(task="Something else.")
    client.host.assert_exact()


@pytest.mark.parametrize("declared", [True, False])
async def test_saved_state_in_a_new_team(make, declared: bool) -> None:
    """Declared members' prompts are the same as before; others are a shorter match until they have been heard."""
    members = {"coder": "You write Python functions.", "tester": "You write a test for the function above."}
    client = make(members=members if declared else None)
    team = RoundRobinGroupChat(pair(client), max_turns=2)
    await team.run(task="Write add(a, b).")
    state = json.loads(json.dumps(await team.save_state()))
    other = RoundRobinGroupChat(pair(client), max_turns=2)
    await other.load_state(state)
    await other.run(task="Now subtract.")
    earlier, first = list(client.host.reports)[1:3]
    computed = earlier.prompt_tokens + earlier.generated_tokens
    assert (first.reused_tokens == computed) is declared and first.reused_tokens > 0
    client.host.assert_exact()


async def test_dumped_and_loaded_team_shares_the_host(make) -> None:
    client = make()
    loaded = RoundRobinGroupChat.load_component(RoundRobinGroupChat(pair(client), max_turns=4).dump_component())
    await loaded.run(task="Write add(a, b).")
    assert client.host.modes == ["TEXT", "KV", "KV", "KV"]
    client.host.assert_exact()


async def test_selector_with_a_retry(make) -> None:
    picks = iter(["nobody", "coder", "tester", "coder"])

    def script(prompt: str) -> str:
        return (
            next(picks)
            if "select the next role" in prompt.rsplit("<|im_start|>user", 2)[1] + prompt[-900:]
            and (speaker(prompt) not in ("coder", "tester"))
            else coder_and_tester(prompt)
        )

    client = make(script)
    team = SelectorGroupChat(pair(client), client, termination_condition=MaxMessageTermination(4))
    result = await team.run(task="Write add(a, b).")
    assert [m.source for m in result.messages] == ["user", "coder", "tester", "coder"]
    spoken = [r for r in client.host.reports if r.agent in ("coder", "tester")]
    assert [r.mode.value for r in spoken][1:] == ["KV", "KV"]
    client.host.assert_exact()


async def test_swarm_hands_off_by_tool_call(make) -> None:
    call = '<tool_call>\n{{"name": "transfer_to_{}", "arguments": {{}}}}\n</tool_call>'

    def script(prompt: str) -> str:
        return call.format("tester") if speaker(prompt) == "coder" else "All good. TERMINATE"

    client = make(script)
    agents = [
        AssistantAgent("coder", client, handoffs=["tester"], system_message="You write Python."),
        AssistantAgent("tester", client, handoffs=["coder"], system_message="You test."),
    ]
    result = await Swarm(agents, termination_condition=TextMentionTermination("TERMINATE")).run(task="Go.")
    assert result.messages[-1].source == "tester" and result.messages[-1].content.startswith("All good.")
    client.host.assert_exact()


async def test_graph_flow_fans_out_and_joins(make) -> None:
    def script(prompt: str) -> str:
        return f"Here speaks {speaker(prompt)}, at some length, so that there is something to reuse."

    client = make(script)
    writer, left, right, editor = (
        AssistantAgent(n, client, system_message=f"You are {n}.") for n in ("writer", "left", "right", "editor")
    )
    builder = DiGraphBuilder()
    for agent in (writer, left, right, editor):
        builder.add_node(agent)
    builder.add_edge(writer, left).add_edge(writer, right).add_edge(left, editor).add_edge(right, editor)
    flow = GraphFlow([writer, left, right, editor], graph=builder.build())
    result = await flow.run(task="Write about the sea.")
    assert {m.source for m in result.messages} >= {"writer", "left", "right", "editor"}
    by_agent = {r.agent: r for r in client.host.reports}
    assert by_agent["left"].mode.value == by_agent["right"].mode.value == "KV"
    assert by_agent["left"].source == by_agent["right"].source == "writer"
    assert by_agent["editor"].reused_tokens > by_agent["left"].reused_tokens
    client.host.assert_exact()


async def test_society_of_mind(make) -> None:
    def script(prompt: str) -> str:
        return "The society says: done." if speaker(prompt) not in ("coder", "tester") else coder_and_tester(prompt)

    client = make(script)
    inner = RoundRobinGroupChat(pair(client), max_turns=2)
    society = SocietyOfMindAgent("society", team=inner, model_client=client)
    outer = RoundRobinGroupChat([society], max_turns=2)
    result = await outer.run(task="Write add(a, b).")
    assert result.messages[-1].content == "The society says: done."
    assert "KV" in client.host.modes
    client.host.assert_exact()


@pytest.mark.parametrize("structured", [True, False])
async def test_magentic_one(make, structured: bool) -> None:
    rounds = iter(["coder", "tester", ""])

    def ledger() -> str:
        name = next(rounds)

        def entry(value: object) -> dict:
            return {"reason": "r", "answer": value}

        answers = {
            "is_request_satisfied": entry(not name),
            "is_in_loop": entry(False),
            "is_progress_being_made": entry(True),
            "next_speaker": entry(name or "coder"),
            "instruction_or_question": entry("go on"),
        }
        return json.dumps(answers, separators=(",", ":"))

    def script(prompt: str) -> str:
        if speaker(prompt) in ("coder", "tester"):
            return coder_and_tester(prompt)
        return ledger() if "is_request_satisfied" in prompt.rsplit("<|im_start|>user", 1)[1] else "Facts and a plan."

    client = make(script)
    client._config.model_info["structured_output"] = structured
    result = await MagenticOneGroupChat(pair(client), client).run(task="Write add(a, b).")
    assert [m.source for m in result.messages if m.source in ("coder", "tester")] == ["coder", "tester"]
    assert "Facts and a plan." in result.messages[-1].content
    reused = sum(r.reused_tokens for r in client.host.reports)
    assert reused > sum(r.prompt_tokens for r in client.host.reports) / 4
    client.host.assert_exact()


async def test_two_teams_with_equal_names_at_once(make) -> None:
    client = make()
    teams = []
    for language in ("Python", "Fortran"):
        agents = [
            AssistantAgent("coder", client, system_message=f"You write {language}."),
            AssistantAgent("tester", client, system_message=f"You test {language}."),
        ]
        teams.append(RoundRobinGroupChat(agents, max_turns=4))
    results = await asyncio.gather(*(team.run(task=f"Task {i}") for i, team in enumerate(teams)))
    assert all([m.content for m in r.messages[1:]] == [CODE, TEST] * 2 for r in results)
    for text in client.host.texts:
        assert ("Python." in text) != ("Fortran." in text), "one team's instructions reached the other"
    client.host.assert_exact()


@pytest.mark.parametrize("reflect", [True, False])
async def test_private_tool_calls_are_not_leaked(make, reflect: bool) -> None:
    def script(prompt: str) -> str:
        if speaker(prompt) == "tester" or "<tool_response>" in prompt.rsplit("<|im_start|>user", 1)[1]:
            return TEST if speaker(prompt) == "tester" else "The answer is forty-two."
        return '<tool_call>\n{"name": "oracle", "arguments": {}}\n</tool_call>'

    def oracle() -> str:
        """Knows everything."""
        return "private-value-42"

    client = make(script)
    coder = AssistantAgent(
        "coder", client, tools=[oracle], reflect_on_tool_use=reflect, system_message="You ask the oracle."
    )
    tester = AssistantAgent("tester", client, system_message="You test.")
    await RoundRobinGroupChat([coder, tester], max_turns=4).run(task="What is the answer?")
    host = client.host
    testers = [text for text, r in zip(host.texts, host.reports, strict=True) if r.agent == "tester"]
    assert len(testers) == 2 and all("<tool_call>" not in text.split("<|im_start|>user", 1)[1] for text in testers)
    if reflect:
        assert all("private-value-42" not in text for text in testers)
    headers = {text.split("<|im_start|>user")[0] for text in host.texts}
    assert len(headers) == 1, "a reflection call or a member without tools must not change the shared header"
    host.assert_exact()


async def test_streaming_team(make) -> None:
    client = make()
    team = RoundRobinGroupChat(pair(client, model_client_stream=True), max_turns=3)
    chunks: dict[str, str] = {}
    async for event in team.run_stream(task="Write add(a, b)."):
        if type(event).__name__ == "ModelClientStreamingChunkEvent":
            chunks[event.source] = chunks.get(event.source, "") + event.content
    assert chunks == {"coder": CODE + CODE, "tester": TEST}
    assert client.host.modes == ["TEXT", "KV", "KV"]
    client.host.assert_exact()


async def test_memory_and_buffered_context_only_shorten_the_match(make) -> None:
    client = make()
    memory = ListMemory()
    await memory.add(MemoryContent(content="Prefer short names.", mime_type=MemoryMimeType.TEXT))
    agents = [
        AssistantAgent("coder", client, system_message="You write Python.", memory=[memory]),
        AssistantAgent(
            "tester", client, system_message="You test.", model_context=BufferedChatCompletionContext(buffer_size=3)
        ),
    ]
    await RoundRobinGroupChat(agents, max_turns=8).run(task="Write add(a, b).")
    assert len(client.host.reports) == 8
    client.host.assert_exact()


async def test_cancelled_run_then_again(make) -> None:
    said = threading.Event()
    client = make(
        lambda p: coder_and_tester(p) if "again" in p else said.set() or CODE * 100,
        max_tokens=None,
        engine=tiny_engine(),
    )
    team = RoundRobinGroupChat(pair(client), max_turns=2)
    token = CancellationToken()
    running = asyncio.create_task(team.run(task="first", cancellation_token=token))
    await asyncio.to_thread(said.wait, 10)
    token.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    pages = client.host.store.page_count
    result = await team.run(task="again")
    assert pages == 0 and result.messages[-1].content in (CODE, TEST)
    client.host.assert_exact()


async def test_an_agent_used_as_a_tool_is_not_taken_for_its_caller(make) -> None:
    def script(prompt: str) -> str:
        last = prompt.rsplit("<|im_start|>user", 1)[1]
        if "You know facts." in last:
            return "The inner agent knows."
        if "<tool_response>" in last:
            return "Outer concludes. TERMINATE"
        return '<tool_call>\n{"name": "expert", "arguments": {"task": "tell me"}}\n</tool_call>'

    client = make(script)
    inner = AssistantAgent("expert", client, system_message="You know facts.", description="knows facts")
    outer = AssistantAgent(
        "outer", client, system_message="You ask the expert.", tools=[AgentTool(inner)], reflect_on_tool_use=True
    )
    team = RoundRobinGroupChat([outer], termination_condition=TextMentionTermination("TERMINATE"), max_turns=3)
    result = await team.run(task="Find out.")
    assert result.messages[-1].content == "Outer concludes. TERMINATE"
    agents = [r.agent for r in client.host.reports]
    assert agents[0] == agents[2] == "outer" != agents[1]
    client.host.assert_exact()


async def test_two_models_in_one_team_replay_text_and_say_the_same(make) -> None:
    """Another model's KV is never used; texts equal those of a run without any handoff."""

    async def texts(name: str, **settings) -> tuple[list[str], list[QKVShareClient]]:
        clients = [
            QKVShareClient(f"tiny-{kind}", host=f"{name}-{kind}", precision="native", max_tokens=24, **settings)
            for kind in ("llama", "qwen2")
        ]
        for client, kind in zip(clients, ("llama", "qwen2"), strict=True):
            client.host._engine = tiny_engine(kind)
        agents = [AssistantAgent(n, c, system_message=f"You are {n}.") for n, c in zip("ab", clients, strict=True)]
        result = await RoundRobinGroupChat(agents, max_turns=4).run(task="Say something.")
        return [m.content for m in result.messages], clients

    shared, clients = await texts("two")
    plain, others = await texts("two-plain", handoff=False)
    try:
        assert shared == plain and len(set(shared)) > 2
        assert [c.reports[0].mode.value for c in clients] == ["TEXT", "TEXT"]
        assert all(r.source in ("", r.agent) for c in clients for r in c.reports), "KV crossed between models"
        assert all("switched off" in r.reasons[0] for c in others for r in c.reports)
    finally:
        for client in clients + others:
            await client.close()
