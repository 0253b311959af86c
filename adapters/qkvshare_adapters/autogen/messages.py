"""AutoGen's messages and tools <-> ours."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from autogen_core import FunctionCall
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResultMessage,
    LLMMessage,
    RequestUsage,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import Tool, ToolSchema
from pydantic import BaseModel

from qkvshare_agents.errors import InvalidMessage, InvalidSetting
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.tool_calls import ToolCall, join_thought, split_thought
from qkvshare_agents.turns.request import Answer

ToolChoice = Tool | Literal["auto", "required", "none"]


def split_instruction(messages: Sequence[LLMMessage]) -> tuple[str, list[LLMMessage]]:
    """The caller's own leading system messages as one text, and the rest."""
    count = next((i for i, m in enumerate(messages) if not isinstance(m, SystemMessage)), len(messages))
    texts = [m.content for m in messages[:count] if isinstance(m, SystemMessage)]
    return "\n\n".join(texts), list(messages[count:])


def to_messages(messages: Sequence[LLMMessage]) -> tuple[Message, ...]:
    """Raises InvalidMessage for images and for kinds of messages that AutoGen does not have."""
    converted: list[Message] = []
    for message in messages:
        if isinstance(message, SystemMessage):
            converted.append(Message("system", message.content))
        elif isinstance(message, UserMessage):
            converted.append(Message("user", _user_text(message), message.source))
        elif isinstance(message, AssistantMessage):
            converted += _assistant(message)
        elif isinstance(message, FunctionExecutionResultMessage):
            converted += [Message("tool", r.content, call_id=r.call_id, tool=r.name) for r in message.content]
        else:
            raise InvalidMessage(f"AutoGen has no {type(message).__name__}; use its classes in autogen_core.models")
    return tuple(converted)


def last_speaker(messages: Sequence[LLMMessage]) -> str | None:
    """Source of the newest assistant message."""
    return next((m.source for m in reversed(messages) if isinstance(m, AssistantMessage)), None)


def to_schemas(tools: Sequence[Tool | ToolSchema]) -> tuple[dict[str, Any], ...]:
    """Tools in the form that chat templates take."""
    return tuple(_schema(tool.schema if isinstance(tool, Tool) else tool) for tool in tools)


def to_result(answer: Answer) -> CreateResult:
    """`cached` stays False: the KV was reused, the completion was not.

    Text beside tool calls is part of the thought, the one place that AutoGen has for it. A thought proper is then
    marked the way models write it, so that `to_messages` tells them apart when the conversation comes back.
    """
    calls = [FunctionCall(id=c.id, name=c.name, arguments=c.arguments) for c in answer.calls]
    return CreateResult(
        finish_reason="length" if answer.finish_reason == "length" else "function_calls" if calls else "stop",
        content=calls or answer.text,
        usage=RequestUsage(answer.prompt_tokens, answer.completion_tokens),
        cached=False,
        thought=(join_thought(answer.thought, answer.text) if calls else answer.thought) or None,
    )


def _assistant(message: AssistantMessage) -> list[Message]:
    """What was said, in content or beside calls. A handoff gives its sender's thought to the target as an answer,
    which is none when nothing was said."""
    told = message.content if isinstance(message.content, str) else message.thought or ""
    said = split_thought(told)[1] if "</think>" in told else told
    if isinstance(message.content, str):
        return [Message("assistant", said, message.source)] if said or not told else []
    calls = tuple(ToolCall(c.id, c.name, c.arguments) for c in message.content)
    return [Message("assistant", said, message.source, calls)]


def _user_text(message: UserMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    if not all(isinstance(part, str) for part in message.content):
        raise InvalidMessage(f"the message from {message.source!r} holds an image; this model reads text only")
    return "\n".join(part for part in message.content if isinstance(part, str))


def _schema(schema: ToolSchema) -> dict[str, Any]:
    parameters: Mapping[str, Any] = schema.get("parameters") or {"type": "object", "properties": {}}
    function = {"name": schema["name"], "description": schema.get("description", ""), "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def allowed_tools(schemas: tuple[dict[str, Any], ...], choice: ToolChoice) -> tuple[dict[str, Any], ...]:
    """The tools that this answer may call."""
    if choice == "none":
        return ()
    if choice == "auto":
        return schemas
    if choice == "required":
        if not schemas:
            raise InvalidSetting("tool_choice is 'required', but no tools are given")
        return schemas
    if isinstance(choice, str):
        raise InvalidSetting(f"tool_choice {choice!r}: use 'auto', 'required', 'none' or one of the tools")
    chosen = tuple(s for s in schemas if s["function"]["name"] == choice.name)
    if not chosen:
        names = ", ".join(s["function"]["name"] for s in schemas) or "none"
        raise InvalidSetting(f"tool_choice is {choice.name!r}, which is not among the given tools: {names}")
    return chosen


def parallel_calls(value: Any) -> bool:
    """Whether an answer may hold several calls: the option `parallel_tool_calls`, checked."""
    if value not in (None, True, False):
        raise InvalidSetting(f"parallel_tool_calls {value!r}: use True or False")
    return value is not False


def json_schema(json_output: bool | type[BaseModel] | None) -> dict[str, Any] | None:
    if json_output is None or json_output is False:
        return None
    if json_output is True:
        return {"type": "object"}
    if isinstance(json_output, type) and issubclass(json_output, BaseModel):
        return json_output.model_json_schema()
    raise InvalidSetting(f"json_output must be True, False, None or a pydantic model class, not {json_output!r}")


def dump_messages(messages: Sequence[LLMMessage]) -> list[dict[str, Any]]:
    return [message.model_dump(mode="json") for message in messages]


def event_fields(result: CreateResult, answer: Answer) -> dict[str, Any]:
    return {
        "response": result.model_dump(mode="json"),
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "handoff": answer.report.to_dict(),
    }
