"""Pieces of an answer as LangChain's chunks."""

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.tool import ToolCallChunk
from langchain_core.outputs import ChatGenerationChunk

from qkvshare_adapters.langchain.messages import answer_fields
from qkvshare_agents.turns.request import Answer


def to_chunk(piece: str | Answer, model: str) -> ChatGenerationChunk:
    """A piece of text; or behind the text, all calls and what is known only at the end."""
    if isinstance(piece, str):
        return ChatGenerationChunk(message=AIMessageChunk(content=piece))
    calls = [
        ToolCallChunk(name=c.name, args=c.arguments, id=c.id, index=i, type="tool_call_chunk")
        for i, c in enumerate(piece.calls)
    ]
    fields = answer_fields(piece, model)
    message = AIMessageChunk(content="", tool_call_chunks=calls, chunk_position="last", **fields)
    return ChatGenerationChunk(message=message)
