"""Agents on one local model continue from each other's quantized KV cache instead of reading the text again."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qkvshare_adapters.autogen import QKVShareChatCompletionClient, QKVShareClient
    from qkvshare_adapters.langchain import ChatQKVShare
    from qkvshare_adapters.langgraph import add_cache_handoff, share_cache
    from qkvshare_agents.access import Access
    from qkvshare_agents.courier import Courier
    from qkvshare_agents.host import Host, HostSettings
    from qkvshare_agents.ledger import Member
    from qkvshare_agents.loaded import forget_model, use_model
    from qkvshare_agents.registry import open_host
    from qkvshare_agents.report import HandoffReport
    from qkvshare_agents.sampling import Sampling
    from qkvshare_agents.transcript import Message, View
    from qkvshare_agents.turn import Answer, Turn

__version__ = "0.1.0"

# Imported on first use: torch and the frameworks take seconds, and `qkvshare --help` needs neither.
_PLACES = {
    "QKVShareClient": "qkvshare_adapters.autogen",
    "QKVShareChatCompletionClient": "qkvshare_adapters.autogen",
    "ChatQKVShare": "qkvshare_adapters.langchain",
    "add_cache_handoff": "qkvshare_adapters.langgraph",
    "share_cache": "qkvshare_adapters.langgraph",
    "Access": "qkvshare_agents.access",
    "Answer": "qkvshare_agents.turn",
    "Courier": "qkvshare_agents.courier",
    "Host": "qkvshare_agents.host",
    "HostSettings": "qkvshare_agents.host",
    "Turn": "qkvshare_agents.turn",
    "Member": "qkvshare_agents.ledger",
    "forget_model": "qkvshare_agents.loaded",
    "use_model": "qkvshare_agents.loaded",
    "open_host": "qkvshare_agents.registry",
    "HandoffReport": "qkvshare_agents.report",
    "Sampling": "qkvshare_agents.sampling",
    "Message": "qkvshare_agents.transcript",
    "View": "qkvshare_agents.transcript",
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
