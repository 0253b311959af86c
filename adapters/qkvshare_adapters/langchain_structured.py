"""Answers that follow a schema, parsed."""

from operator import itemgetter
from typing import Any

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.pydantic import is_basemodel_subclass

from qkvshare_adapters.langchain_messages import response_format
from qkvshare_agents.errors import InvalidSetting

_METHODS = ("json_schema", "function_calling", "json_mode")


def structured(
    model: BaseChatModel, schema: Any, *, method: str, include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """`model` with its answers held to `schema` and parsed; with `json_mode` and no schema, to any JSON object."""
    if method not in _METHODS or (schema is None and method != "json_mode"):
        raise InvalidSetting(f"method {method!r} with schema {schema!r}: use {', '.join(_METHODS)} with a schema")
    llm = model.bind(
        response_format=response_format(schema),
        ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
    )
    parser: BaseOutputParser[Any] = JsonOutputParser()
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        parser = PydanticOutputParser(pydantic_object=schema)
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
