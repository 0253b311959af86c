"""LangChain's messages, tools and schemas <-> ours."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from qkvshare_adapters.langchain.caller import Caller
from qkvshare_adapters.langchain.recursion import openai_tool
from qkvshare_agents.errors import InvalidMessage, InvalidSetting
from qkvshare_agents.prompt.layout import Message, Role, ledger_key
from qkvshare_agents.prompt.ledger import Ledger
from qkvshare_agents.prompt.tool_calls import ToolCall
from qkvshare_agents.turns.request import Answer

Schemas = tuple[dict[str, Any], ...]
_CALL_BLOCKS = ("tool_use", "tool_call", "tool_call_chunk", "function_call", "server_tool_call")
_SCHEMA_WORDS = {"properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "items"}
_THOUGHT_BLOCKS = ("reasoning", "thinking", "redacted_thinking")
_ROLES: dict[str, Role] = {"user": "user", "human": "user", "assistant": "assistant", "ai": "assistant"}


def split_instruction(messages: Sequence[BaseMessage]) -> tuple[str, list[BaseMessage]]:
    """The caller's own leading system messages as one text, and the rest."""
    count = next((i for i, m in enumerate(messages) if not isinstance(m, SystemMessage)), len(messages))
    return "\n\n".join(_text(message) for message in messages[:count]), list(messages[count:])


def to_messages(messages: Sequence[BaseMessage], caller: Caller, ledger: Ledger) -> tuple[Message, ...]:
    """The messages as `caller` sees them: answers of agents that it does not see are text of the user's.

    Raises InvalidMessage for images and other media, and for kinds of messages that can't be laid out.
    """
    converted: list[Message] = []
    tools: dict[str, str] = {}
    for message in messages:
        text = _text(message)
        if isinstance(message, AIMessage):
            calls = tuple(ToolCall(c["id"] or "", c["name"], _arguments(c["args"])) for c in message.tool_calls)
            tools |= {call.id: call.name for call in calls}
            source = caller.author(message, ledger_key(text, calls), ledger)
            role: Role = "assistant" if not source or caller.sees(source) else "user"
            converted.append(Message(role, text, source, calls))
        elif isinstance(message, ToolMessage):
            name = message.name or tools.get(message.tool_call_id, "")
            converted.append(Message("tool", text, call_id=message.tool_call_id, tool=name))
        elif isinstance(message, FunctionMessage):
            converted.append(Message("tool", text, tool=message.name))
        elif isinstance(message, SystemMessage):
            converted.append(Message("system", text))
        elif isinstance(message, HumanMessage):
            own = bool(message.name) and message.name == caller.name  # nodes may store answers as named messages
            converted.append(Message("assistant" if own else "user", text, message.name or "user"))
        elif isinstance(message, ChatMessage) and message.role in _ROLES:
            converted.append(Message(_ROLES[message.role], text, message.name or ""))
        else:
            raise InvalidMessage(f"a {type(message).__name__} can't be laid out; use Human, AI, System or ToolMessage")
    return tuple(converted)


def to_schemas(tools: Sequence[Any]) -> Schemas:
    """Tools of any kind that LangChain knows, in the form that chat templates take."""
    return tuple(_plain_tool(openai_tool(tool)) for tool in tools)


def allowed_tools(schemas: Schemas, choice: Any) -> tuple[Schemas, bool]:
    """(the tools that this answer may call, whether it has to call one).

    choice: None or "auto", "none" or False, "any", "required" or True, a tool's name, or OpenAI's dict with it.
    """
    if choice in (None, "auto"):
        return schemas, False
    if choice in (False, "none"):
        return (), False
    names = [schema["function"]["name"] for schema in schemas]
    if choice in (True, "any", "required"):
        if not schemas:
            raise InvalidSetting(f"tool_choice is {choice!r}, but no tools are given")
        return schemas, True
    name = choice.get("function", choice).get("name") if isinstance(choice, Mapping) else choice
    if name not in names:
        raise InvalidSetting(
            f"tool_choice {choice!r}: use 'auto', 'any', 'none' or one of the given tools: {', '.join(names) or 'none'}"
        )
    return tuple(schema for schema in schemas if schema["function"]["name"] == name), True


def parallel_calls(value: Any) -> bool:
    """Whether an answer may hold several calls: the option `parallel_tool_calls`, checked."""
    if value not in (None, True, False):
        raise InvalidSetting(f"parallel_tool_calls {value!r}: use True or False")
    return value is not False


def response_format(schema: Any) -> dict[str, Any]:
    """A pydantic class, TypedDict, function or JSON schema as OpenAI's `response_format`; None: any object."""
    if schema is None:
        return {"type": "json_object"}
    if isinstance(schema, Mapping) and _SCHEMA_WORDS & schema.keys():  # LangChain drops all but properties
        converted = dict(schema)
    else:
        function = openai_tool(schema)["function"]
        converted = {"title": function["name"], **function.get("parameters", {})}
        if "description" in function:
            converted["description"] = function["description"]
    return {"type": "json_schema", "json_schema": {"name": converted.get("title", "answer"), "schema": converted}}


def json_schema(form: Any) -> dict[str, Any] | None:
    """The schema in OpenAI's `response_format`."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    try:
        if kind != "json_schema":
            raise KeyError(kind)
        schema = dict(form["json_schema"]["schema"])
    except (TypeError, KeyError, ValueError):
        text = '{"type": "json_schema", "json_schema": {"schema": {...}}} or {"type": "json_object"}'
        raise InvalidSetting(f"response_format {form!r}: use {text}") from None
    return schema


def answer_fields(answer: Answer, model: str) -> dict[str, Any]:
    """What an AIMessage says besides its text and calls; plain numbers and strings, ready for any checkpointer."""
    report = answer.report
    handoff = {**report.to_dict(), "handle": answer.handle}
    return {
        "additional_kwargs": {"reasoning_content": answer.thought} if answer.thought else {},
        "response_metadata": {"model_name": model, "finish_reason": answer.finish_reason, "qkvshare": handoff},
        "usage_metadata": UsageMetadata(
            input_tokens=answer.prompt_tokens,
            output_tokens=answer.completion_tokens,
            total_tokens=answer.prompt_tokens + answer.completion_tokens,
            input_token_details=InputTokenDetails(cache_read=report.reused_tokens),
        ),
    }


def to_message(answer: Answer, model: str) -> AIMessage:
    calls = [{"name": c.name, "args": json.loads(c.arguments), "id": c.id, "type": "tool_call"} for c in answer.calls]
    return AIMessage(content=answer.text, tool_calls=calls, **answer_fields(answer, model))


def _arguments(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _plain_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidSetting(f"a tool of type {tool.get('type')!r} runs at its provider; a local model calls functions")
    function = tool["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    plain = {"name": function["name"], "description": function.get("description", ""), "parameters": parameters}
    return {"type": "function", "function": plain}


def _text(message: BaseMessage) -> str:
    """The text of a message. Calls stand beside it, thoughts are not shown again."""
    if isinstance(message.content, str):
        return message.content
    for block in message.content:
        kind = "text" if isinstance(block, str) else block.get("type")
        if kind != "text" and not (isinstance(message, AIMessage) and kind in (*_CALL_BLOCKS, *_THOUGHT_BLOCKS)):
            who = message.name or message.type
            raise InvalidMessage(f"the message from {who!r} holds a block of type {kind!r}; this model reads text only")
    return str(message.text)
