"""Answers that follow a schema, parsed. An answer that was cut is an error, never a shorter object."""

import json
from operator import itemgetter
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.base import BaseGenerationOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.pydantic import is_basemodel_subclass

from qkvshare_adapters.langchain.messages import response_format, to_schemas
from qkvshare_agents.errors import InvalidSetting

_METHODS = ("json_schema", "function_calling", "json_mode")


def structured(
    model: BaseChatModel, schema: Any, *, method: str, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """`model` with its answers held to `schema` and parsed; with `json_mode` and no schema, to any JSON object."""
    if method not in _METHODS or (schema is None and method != "json_mode"):
        raise InvalidSetting(f"method {method!r} with schema {schema!r}: use {', '.join(_METHODS)} with a schema")
    told = {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema}}
    pydantic = isinstance(schema, type) and is_basemodel_subclass(schema)
    llm: Runnable[LanguageModelInput, AIMessage]
    parser: Any
    if method == "function_calling":
        llm = model.bind_tools([schema], tool_choice="any", **told)
        name = to_schemas([schema])[0]["function"]["name"]
        parser = _Tools(tools=[schema], first_tool_only=True) if pydantic else _Keyed(key_name=name)
    else:
        llm = model.bind(response_format=response_format(schema), **told)
        parser = _Object(pydantic_object=schema) if pydantic else _Json()
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")


class _Whole(BaseGenerationOutputParser[Any]):
    """Lets the parsers below read whole answers only: by themselves they close what was cut."""

    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        """partial: of a stream; its last chunk completes the answer. Raises OutputParserException."""
        message = result[0].message if isinstance(result[0], ChatGeneration) else None
        if isinstance(message, AIMessage):
            if message.response_metadata.get("finish_reason") == "length":
                raise _cut("by its limit of tokens; raise max_tokens, or context_tokens", message)
            partial = partial and getattr(message, "chunk_position", None) != "last"
            if not partial and not _is_whole(message):
                raise _cut("by a stop string; remove the one that the answer holds", message)
        return super().parse_result(result, partial=partial)  # type: ignore[safe-super]


class _Json(_Whole, JsonOutputParser):
    pass


class _Object(_Whole, PydanticOutputParser[Any]):
    pass


class _Tools(_Whole, PydanticToolsParser):
    pass


class _Keyed(_Whole, JsonOutputKeyToolsParser):
    first_tool_only: bool = True


def _is_whole(message: AIMessage) -> bool:
    """Whether there is a call, or text that is JSON without any mending."""
    try:
        return bool(message.tool_calls) or json.loads(str(message.text)) is not Ellipsis
    except ValueError:
        return False


def _cut(how: str, message: AIMessage) -> OutputParserException:
    text = str(message.text)
    return OutputParserException(f"the answer was cut {how}. It is no whole object: {text}", llm_output=text)
