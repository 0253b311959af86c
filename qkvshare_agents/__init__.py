"""Agents on one local model continue from each other's quantized KV cache instead of reading the text again."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkvshare_adapters.autogen.client import QKVShareChatCompletionClient, QKVShareClient
    from qkvshare_adapters.langchain.chat_model import ChatQKVShare
    from qkvshare_adapters.langgraph.handoff import add_cache_handoff, share_cache
    from qkvshare_agents.host.courier import Courier
    from qkvshare_agents.host.host import Host
    from qkvshare_agents.host.registry import open_host
    from qkvshare_agents.model.loaded import forget_model, use_model
    from qkvshare_agents.prompt.layout import Message, View
    from qkvshare_agents.prompt.members import Member
    from qkvshare_agents.prompt.sampling import Sampling
    from qkvshare_agents.settings import HostSettings
    from qkvshare_agents.turns.access import Access
    from qkvshare_agents.turns.report import HandoffReport
    from qkvshare_agents.turns.request import Answer, Turn

__version__ = "0.1.0"

# Imported on first use: torch and the frameworks take seconds, and `qkvshare --help` needs neither.
_PLACES = {
    "QKVShareClient": "qkvshare_adapters.autogen.client",
    "QKVShareChatCompletionClient": "qkvshare_adapters.autogen.client",
    "ChatQKVShare": "qkvshare_adapters.langchain.chat_model",
    "add_cache_handoff": "qkvshare_adapters.langgraph.handoff",
    "share_cache": "qkvshare_adapters.langgraph.handoff",
    "Access": "qkvshare_agents.turns.access",
    "Answer": "qkvshare_agents.turns.request",
    "Courier": "qkvshare_agents.host.courier",
    "Host": "qkvshare_agents.host.host",
    "HostSettings": "qkvshare_agents.host.host",
    "Turn": "qkvshare_agents.turns.request",
    "Member": "qkvshare_agents.prompt.ledger",
    "forget_model": "qkvshare_agents.model.loaded",
    "use_model": "qkvshare_agents.model.loaded",
    "open_host": "qkvshare_agents.host.registry",
    "HandoffReport": "qkvshare_agents.turns.report",
    "Sampling": "qkvshare_agents.prompt.sampling",
    "Message": "qkvshare_agents.prompt.layout",
    "View": "qkvshare_agents.prompt.layout",
}
__all__ = [
    "Access", "Answer", "ChatQKVShare", "Courier", "HandoffReport", "Host", "HostSettings", "Member", "Message",
    "QKVShareChatCompletionClient", "QKVShareClient", "Sampling", "Turn", "View", "add_cache_handoff",
    "forget_model", "open_host", "share_cache", "use_model",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
