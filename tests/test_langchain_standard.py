"""The whole standard suite of langchain-tests against the demo model; what is switched off is listed with its reason.

| switched off | why |
|---|---|
| test_init_from_env | the model reads no key or name from the environment |
| images, audio, PDF, video, Anthropic's content blocks | a text model; other blocks are refused with InvalidMessage |
| test_stream_time | needs recorded HTTP traffic; a local model makes none |
| test_agent_loop, test_unicode_tool_call_integration | expected to fail on the demo model only: they need a voluntary, sensible tool call, which 135M parameters do not make |
"""

import pytest
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from qkvshare_agents import ChatQKVShare, registry

HOST = "langchain-standard"


@pytest.fixture(scope="module", autouse=True)
def demo_host(demo_engine):
    model = ChatQKVShare(host=HOST, dtype="float32", max_tokens=48)
    model.shared_host._engine = demo_engine
    yield
    host = registry._hosts.get(HOST)
    if host:
        host._engine = None
    model.close()


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self):
        return ChatQKVShare

    @property
    def chat_model_params(self):
        return {"host": HOST, "dtype": "float32"}


class TestIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self):
        return ChatQKVShare

    @property
    def chat_model_params(self):
        return {"host": HOST, "dtype": "float32", "max_tokens": 48}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self):
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatQKVShare(**self.chat_model_params)
        model.invoke("Hello there, how are you today?")
        if not stream:
            return model.invoke("Hello there, how are you today?")
        full = None
        for chunk in model.stream("Hello there, how are you today?"):
            full = chunk if full is None else full + chunk
        return full
