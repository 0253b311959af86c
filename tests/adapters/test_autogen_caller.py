"""Who is calling, in AutoGen: agents in agents, in tools, in teams, all with one and the same system message."""

import asyncio
import json
import re
from collections.abc import Iterator

import pytest
from autogen_agentchat.agents import (
    AssistantAgent,
    BaseChatAgent,
    MessageFilterAgent,
    MessageFilterConfig,
    PerSourceFilter,
    SocietyOfMindAgent,
)
from autogen_agentchat.base import Response
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import CancellationToken
from autogen_core.models import AssistantMessage, SystemMessage, UserMessage
from scripted import ScriptedHost, install, uninstall
from support import tiny_engine

from qkvshare_agents import QKVShareClient

SAME = "You are a helpful assistant, and you help whoever asks you for help."
_ENGINE = tiny_engine()


@pytest.fixture
def client() -> Iterator[QKVShareClient]:
    """Calls the one tool of `call` that the prompt's header offers and that was not called yet, else answers."""
    install(ScriptedHost(speak, engine=_ENGINE), "callers")
    yield QKVShareClient("scripted", host="callers", precision="native")
    uninstall("callers")


def speak(prompt: str) -> str:
    offered = [name for name in tools_in(prompt) if name in ("helper", "crew", "ask")]
    if offered and "<tool_response>" not in prompt.rsplit("<|im_start|>user", 1)[1]:
        return f'<tool_call>\n{{"name": "{offered[0]}", "arguments": {{"task": "Help me."}}}}\n</tool_call>'
    return f"Here is answer {len(prompt)}, and that is it."


def tools_in(prompt: str) -> list[str]:
    return re.findall(r'"function": \{"name": "(\w+)"', prompt)


def agent(client: QKVShareClient, name: str, *tools: object, **options: object) -> AssistantAgent:
    options = {"system_message": SAME, "reflect_on_tool_use": bool(tools), **options}
    return AssistantAgent(name, client, tools=list(tools), **options)


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def callers(client: QKVShareClient) -> list[str]:
    return [report.agent for report in client.host.reports]


def assert_cues_name(client: QKVShareClient, *names: str) -> None:
    """Each prompt's last cue names its speaker. Results of an agent's own calls need none."""
    client.host.assert_exact()
    cues = [re.findall(r"\[(\w+)\]", text.rsplit("<|im_start|>user", 1)[1])[-1:] for text in client.host.texts]
    assert [cue[0] if cue else name for cue, name in zip(cues, names, strict=True)] == list(names)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["helper", "outer"])
async def test_an_agent_in_a_tool(client: QKVShareClient, name: str, stream: bool) -> None:
    """Even when it has its caller's name, it is another member in a scope of its own."""
    helper = agent(client, name, add, model_client_stream=stream, reflect_on_tool_use=False)
    tool = AgentTool(helper)
    tool._name = "helper"
    outer = agent(client, "outer", tool, model_client_stream=stream)
    await RoundRobinGroupChat([outer], max_turns=2).run(task="What is 1 + 2?")
    assert callers(client) == ["outer", name, "outer"] * 2
    assert [tools_in(text) for text in client.host.texts] == [["helper"], ["add"], ["helper"]] * 2
    assert_cues_name(client, *["outer", name, "outer"] * 2)
    scopes = [turn.scope for turn in client.host.turns]
    assert scopes[0] == scopes[2] != scopes[1] == scopes[4]


async def test_a_tool_in_an_agent_in_a_tool(client: QKVShareClient) -> None:
    inner = AgentTool(agent(client, "helper", add, reflect_on_tool_use=False))
    middle = AgentTool(agent(client, "crew", inner))
    outer = agent(client, "outer", middle)
    await RoundRobinGroupChat([outer], max_turns=1).run(task="What is 1 + 2?")
    assert callers(client) == ["outer", "crew", "helper", "crew", "outer"]
    assert len({turn.scope for turn in client.host.turns}) == 3
    assert [tools_in(t) for t in client.host.texts] == [["crew"], ["helper"], ["add"], ["helper"], ["crew"]]


async def test_an_agent_in_a_tool_of_an_agent_without_a_team(client: QKVShareClient) -> None:
    outer = agent(client, "outer", AgentTool(agent(client, "helper", add, reflect_on_tool_use=False)))
    await outer.run(task="What is 1 + 2?")
    assert callers(client) == ["outer", "helper", "outer"]
    assert [tools_in(text) for text in client.host.texts] == [["helper"], ["add"], ["helper"]]


async def test_a_team_in_a_tool(client: QKVShareClient) -> None:
    inner = RoundRobinGroupChat([agent(client, "outer"), agent(client, "tester")], max_turns=2)
    tool = TeamTool(inner, name="crew", description="A crew.")
    await RoundRobinGroupChat([agent(client, "outer", tool)], max_turns=1).run(task="Ask the crew.")
    assert callers(client) == ["outer", "outer", "tester", "outer"]
    assert [tools_in(text) for text in client.host.texts] == [["crew"], [], [], ["crew"]]
    assert len({turn.scope for turn in client.host.turns}) == 2
    client.host.assert_exact()


async def test_a_tool_that_asks_the_model_itself(client: QKVShareClient) -> None:
    async def ask(task: str) -> str:
        """Asks the model."""
        result = await client.create([SystemMessage(content=SAME), UserMessage(content=task, source="user")])
        return str(result.content)

    await RoundRobinGroupChat([agent(client, "outer", ask)], max_turns=1).run(task="What is 1 + 2?")
    assert callers(client)[::2] == ["outer", "outer"] and callers(client)[1].startswith("#")
    assert [tools_in(text) for text in client.host.texts] == [["ask"], [], ["ask"]]


async def test_two_agents_with_one_system_message(client: QKVShareClient) -> None:
    agents = [agent(client, "left", add, reflect_on_tool_use=False), agent(client, "right")]
    await agents[0].run(task="Alone, first.")
    await RoundRobinGroupChat(agents, max_turns=4).run(task="Talk.")
    assert callers(client) == ["left", *["left", "right"] * 2]
    assert_cues_name(client, "left", *["left", "right"] * 2)
    assert client.host.turns[0].scope != client.host.turns[1].scope


async def test_one_agent_in_two_teams(client: QKVShareClient) -> None:
    shared = agent(client, "shared")
    for other in ("left", "right"):
        await RoundRobinGroupChat([shared, agent(client, other, add)], max_turns=2).run(task="Talk.")
    assert callers(client) == ["shared", "left", "shared", "right"]
    assert len({turn.scope for turn in client.host.turns}) == 2
    assert "[left] " not in client.host.texts[3]
    client.host.assert_exact()


async def test_a_society_and_its_members(client: QKVShareClient) -> None:
    inner = RoundRobinGroupChat([agent(client, "left"), agent(client, "society")], max_turns=2)
    society = SocietyOfMindAgent("society", team=inner, model_client=client)
    await RoundRobinGroupChat([society, agent(client, "left")], max_turns=2).run(task="Talk.")
    assert callers(client) == ["left", "society", "society", "left"]
    scopes = [turn.scope for turn in client.host.turns]
    assert scopes[0] == scopes[1] != scopes[2] == scopes[3]


async def test_agents_without_a_team_are_told_apart(client: QKVShareClient) -> None:
    for name in ("left", "right", "left"):
        await agent(client, name).run(task="Talk.")
    await asyncio.gather(*(agent(client, name).run(task="Talk.") for name in ("left", "right")))
    assert callers(client) == ["left", "right", "left", "left", "right"]


async def test_a_wrapped_agent_is_one_with_its_wrapper(client: QKVShareClient) -> None:
    last = MessageFilterConfig(per_source=[PerSourceFilter(source="user", position="last", count=1)])
    wrapped = MessageFilterAgent("left", agent(client, "left"), last)
    await RoundRobinGroupChat([wrapped, agent(client, "right")], max_turns=2).run(task="Talk.")
    assert callers(client) == ["left", "right"] and len({turn.scope for turn in client.host.turns}) == 1


class Task(BaseChatAgent):
    """An agent that calls its model in a task of its own, where no stack shows it."""

    def __init__(self, name: str, client: QKVShareClient, *, forgets: bool) -> None:
        super().__init__(name, "asks the model")
        self._client, self._forgets, self._said = client, forgets, []

    @property
    def produced_message_types(self) -> list[type]:
        return [TextMessage]

    async def on_messages(self, messages: object, cancellation_token: CancellationToken) -> Response:
        asked = [SystemMessage(content=SAME), UserMessage(content="Talk.", source="user"), *self._said]
        result = await asyncio.create_task(self._client.create(asked))
        if not self._forgets:
            self._said.append(AssistantMessage(content=str(result.content), source=self.name))
        return Response(chat_message=TextMessage(content=str(result.content), source=self.name))

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        self._said = []


@pytest.mark.parametrize("forgets", [False, True])
async def test_where_no_stack_shows_the_agent(client: QKVShareClient, forgets: bool) -> None:
    """The running agent as far as that is certain, else nobody, and never its caller."""
    await RoundRobinGroupChat([Task("left", client, forgets=forgets)], max_turns=2).run(task="Go.")
    assert callers(client) == ["left", "left"]
    helper = AgentTool(Task("helper", client, forgets=forgets))
    await RoundRobinGroupChat([agent(client, "outer", helper)], max_turns=1).run(task="Go.")
    assert callers(client)[2::2] == ["outer", "outer"] and callers(client)[3].startswith("#")
    assert [tools_in(text) for text in client.host.texts[2:]] == [["helper"]] * 3
    client.host.assert_exact()


async def test_who_is_told_is_believed_in_a_tool_too(client: QKVShareClient) -> None:
    helper = agent(client.for_agent("expert"), "helper")
    await RoundRobinGroupChat([agent(client, "outer", AgentTool(helper))], max_turns=1).run(task="Go.")
    assert callers(client) == ["outer", "expert", "outer"]
    assert json.loads(client.host.turns[1].scope)[1:] == ["outer", "helper"]
