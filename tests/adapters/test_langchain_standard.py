"""The whole standard suite of langchain-tests, against a tiny model whose words are scripted and whose KV is real.

Constrained decoding, streaming, usage and the handoff run as they do for any model. Switched off or replaced:

| test | why |
|---|---|
| test_init_from_env | skipped: the model reads no key or name from the environment |
| test_serdes | expected to fail: load() takes others' classes only when passed; see test_serialised_and_loaded |
| images, audio, PDF, Anthropic's blocks (6 tests) | skipped: a text model, which refuses other blocks |
| test_stream_time | skipped: needs recorded HTTP traffic; a local model makes none |
"""

import re

import pytest
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from pydantic import BaseModel
from scripted import ScriptedHost, install, uninstall
from support import tiny_engine

from qkvshare_agents import ChatQKVShare
from qkvshare_agents.host import registry
from qkvshare_agents.settings import HostSettings

HOST, OTHER_MODEL = "langchain-standard", "another-model"
ARGUMENTS = {
    "magic_function": '{"input": 3}',
    "magic_function_no_args": "{}",
    "greeting_generator": '{"answer_style": "Pirate"}',
    "get_weather": '{"location": "San Francisco"}',
    "unicode_customer": '{"customer_name": "你好啊集团", "description": "a technology company"}',
    "my_adder_tool": '{"a": 1, "b": 2}',
    "Joke": '{"setup": "Why do cats code?", "punchline": "For the mouse."}',
}


def speak(prompt: str) -> str:
    asked = prompt.rpartition("<|im_start|>user\n")[2]
    tools = re.findall(r'{"type": "function", "function": {"name": "(\w+)"', prompt)
    if tools and "<tool_response>" not in asked:
        arguments = ARGUMENTS[tools[0]].replace(
            "你好啊集团", "こんにちは株式会社" if "こんにちは" in asked else "你好啊集团"
        )
        return f'<tool_call>\n{{"name": "{tools[0]}", "arguments": {arguments}}}\n</tool_call>'
    if "joke" in asked.lower():
        return '{"setup":"Why do cats code?","punchline":"For the mouse."}'
    return "Hello there, how are you?"


@pytest.fixture(scope="module", autouse=True)
def host():
    engine = tiny_engine()
    names = [HOST, registry.default_name(HostSettings(OTHER_MODEL, precision="native"))]
    install(ScriptedHost(speak, engine=engine), names[0])
    other = ScriptedHost(speak, engine=engine)
    other.settings = HostSettings(OTHER_MODEL, precision="native")
    install(other, names[1])
    yield registry._hosts[HOST]
    registry._hosts[HOST].assert_exact()
    for name in names:
        uninstall(name)


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self):
        return ChatQKVShare

    @property
    def chat_model_params(self):
        return {"model": "scripted", "host": HOST, "precision": "native"}

    @pytest.mark.xfail(reason="load() refuses classes of other packages unless they are passed", strict=True)
    def test_serdes(self, model: ChatQKVShare, snapshot) -> None:
        super().test_serdes(model, snapshot)

    def test_serialised_and_loaded(self, model: ChatQKVShare) -> None:
        loaded = load(dumpd(model), allowed_objects=[ChatQKVShare], valid_namespaces=["qkvshare_adapters"])
        assert loaded == model and "api_key" not in dumpd(model)["kwargs"]


class TestIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self):
        return ChatQKVShare

    @property
    def chat_model_params(self):
        return {"model": "scripted", "host": HOST, "precision": "native"}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return OTHER_MODEL

    @property
    def supported_usage_metadata_details(self):
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model, question = ChatQKVShare(**self.chat_model_params), "Hello there, how are you today?"
        model.invoke(question)
        if not stream:
            return model.invoke(question)
        first, *rest = model.stream(question)
        return sum(rest, first)


class Verdict(BaseModel):
    passed: bool
    reason: str


def test_the_demo_model_keeps_to_tools_and_schemas(demo_engine) -> None:
    """What the script above makes easy: the model's own words, held to a grammar token by token."""
    model = ChatQKVShare(host="standard-demo", dtype="float32", max_tokens=60, repetition_penalty=1.3)
    model.shared_host._engine = demo_engine
    try:
        verdict = model.with_structured_output(Verdict).invoke("Is 2 + 2 = 4? Answer with a verdict.")
        assert isinstance(verdict, Verdict)

        def lookup(city: str) -> str:
            """The weather in a city."""
            return city

        called = model.bind_tools([lookup], tool_choice="any").invoke("What is the weather in Paris?")
        assert [call["name"] for call in called.tool_calls] == ["lookup"] and called.tool_calls[0]["args"]["city"]
    finally:
        model.shared_host._engine = None
        model.close()
