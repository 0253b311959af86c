"""What an agent said lies in the framework's own messages: a new process, which knows nothing of what was generated,
lays out the same text. (`ScriptedHost.assert_exact` checks that for every turn of every test that uses it.)"""

import json
import re
from collections.abc import Callable

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat, Swarm
from autogen_core.models import AssistantMessage, CreateResult, UserMessage
from autogen_core.tools import FunctionTool
from langchain_core.messages import HumanMessage, ToolMessage, messages_from_dict, messages_to_dict
from langchain_core.tools import tool
from scripted import ScriptedHost, install, uninstall
from support import tiny_engine

from qkvshare_agents import ChatQKVShare, QKVShareClient

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"city": "Paris"}}\n</tool_call>'
SENTENCE, THOUGHT = "First I look up Paris, then Rome.", "<think>\nRome is a secret.\n</think>\n\n"
SAID = {"sentence": SENTENCE, "thought": THOUGHT, "both": THOUGHT + SENTENCE, "neither": ""}
_ENGINE = tiny_engine()


@pytest.fixture
def process():
    """Makes hosts, each of which remembers nothing of the others."""
    names: list[str] = []

    def start(script: Callable[[str], str]) -> str:
        names.append(f"process-{len(names)}")
        install(ScriptedHost(script, engine=_ENGINE), names[-1])
        return names[-1]

    yield start
    for name in names:
        uninstall(name)


def lookup(city: str) -> str:
    """Looks up the weather."""
    return "It is sunny."


def words(client: QKVShareClient | ChatQKVShare) -> list[str]:
    """The newest prompt. Calls are written in another spelling than the model's."""
    host = client.host if isinstance(client, QKVShareClient) else client.shared_host
    host.assert_exact()
    return host.texts[-1].split()


def once_called(said: str) -> Callable[[str], str]:
    """Says something and calls a tool, then concludes."""
    return lambda prompt: "So it is sunny." if "It is sunny." in prompt else f"{said}\n{CALL}"


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
async def test_an_autogen_team_after_a_restart(process, said: str) -> None:
    def team(name: str) -> tuple[QKVShareClient, RoundRobinGroupChat]:
        client = QKVShareClient("scripted", host=name, precision="native")
        scout = AssistantAgent("scout", client, tools=[lookup], reflect_on_tool_use=True, system_message="Look.")
        return client, RoundRobinGroupChat([scout], max_turns=1)

    client, running = team(process(once_called(said)))
    await running.run(task="Weather?")
    state = json.loads(json.dumps(await running.save_state()))
    await running.run(task="Go on.")
    other, restarted = team(process(once_called(said)))
    await restarted.load_state(state)
    await restarted.run(task="Go on.")
    assert words(other) == words(client)
    assert (SENTENCE in " ".join(words(other))) is (SENTENCE in said) and "secret" not in words(other)


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
async def test_an_autogen_result_holds_thought_and_sentence(process, said: str) -> None:
    client = QKVShareClient("scripted", host=process(lambda _: f"{said}\n{CALL}"), precision="native")
    task, tools = UserMessage(content="Weather?", source="user"), [FunctionTool(lookup, description="Looks up.")]
    result = await client.create([task], tools=tools)
    *_, streamed = [part async for part in client.create_stream([task], tools=tools)]
    assert isinstance(streamed, CreateResult) and streamed.thought == result.thought == (said.strip() or None)


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
async def test_a_handoff_takes_along_what_was_said_and_no_thought(process, said: str) -> None:
    """AutoGen gives the target the sender's thought as an answer."""
    leave = '<tool_call>\n{"name": "transfer_to_tester", "arguments": {}}\n</tool_call>'
    name = process(lambda prompt: "Good." if "[tester]" in prompt[-90:] else f"{said}\n{leave}")
    client = QKVShareClient("scripted", host=name, precision="native")
    coder = AssistantAgent("coder", client, handoffs=["tester"], system_message="You code.")
    tester = AssistantAgent("tester", client, system_message="You test.")
    await Swarm([coder, tester], termination_condition=MaxMessageTermination(3)).run(task="Go.")
    client.host.assert_exact()
    text = client.host.texts[1]
    assert client.host.reports[1].agent == "tester" and "secret" not in text
    answers = re.findall(r"<\|im_start\|>assistant\n(.+?)<\|im_end\|>", text, re.DOTALL)
    assert answers[:-1] == [SENTENCE] * (SENTENCE in said) and answers[-1].startswith("Transferred to tester")


def test_thoughts_of_other_clients_are_said_text(process) -> None:
    """As AutoGen's other clients send them back."""
    client = QKVShareClient("scripted", host=process(lambda _: ""), precision="native")
    call = {"id": "1", "name": "lookup", "arguments": "{}"}
    said = AssistantMessage.model_validate({"content": [call], "source": "scout", "thought": SENTENCE})
    task = UserMessage(content="Weather?", source="user")
    counted = [client.count_tokens([task, message]) for message in (said, said.model_copy(update={"thought": None}))]
    assert counted[0] > counted[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_a_langchain_conversation_after_a_restart(process, said: str, stream: bool) -> None:
    def model(name: str) -> ChatQKVShare:
        return ChatQKVShare(model="scripted", host=name, precision="native", agent="scout", streaming=stream)

    first, tools = model(process(once_called(said))), [tool(lookup)]
    asked = HumanMessage("Weather?")
    answer = first.bind_tools(tools).invoke([asked])
    assert answer.content == (SENTENCE if SENTENCE in said else "") and len(answer.tool_calls) == 1
    told = ToolMessage("It is sunny.", tool_call_id=answer.tool_calls[0]["id"])
    saved = json.loads(json.dumps(messages_to_dict([asked, answer, told])))
    first.bind_tools(tools).invoke([asked, answer, told])
    assert first.reports[-1].mode.value == ("PARTIAL" if THOUGHT in said else "KV"), "known by its message"
    other = model(process(once_called(said)))
    other.bind_tools(tools).invoke(messages_from_dict(saved))
    assert words(other) == words(first)
    assert (SENTENCE in " ".join(words(other))) is (SENTENCE in said) and "secret" not in words(other)
