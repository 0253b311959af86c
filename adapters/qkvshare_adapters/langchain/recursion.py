"""JSON schemas that refer to themselves. LangChain writes references out and ends a recursion in `{}`, which allows
anything; so the schema as pydantic wrote it takes the place of the written-out one.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from langchain_core.tools import BaseTool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import TypeAdapter
from typing_extensions import is_typeddict

_DEFINED = "#/$defs/"


def openai_tool(source: Any) -> dict[str, Any]:
    """`source` as LangChain's OpenAI tool, with its recursion kept."""
    own = _own_schema(source)
    if own is None or not _recursive(own):
        return convert_to_openai_tool(source)
    function = {"name": own.get("title"), "description": own.get("description", "")}
    if not is_typeddict(source):  # LangChain can't write those out at all
        function = convert_to_openai_tool(source)["function"]
    parameters = {name: part for name, part in own.items() if name not in ("title", "description")}
    return {"type": "function", "function": {**function, "parameters": _untitled(parameters)}}


def _own_schema(source: Any) -> dict[str, Any] | None:
    """The schema that pydantic writes for a tool's arguments, its root no reference; None if there is none."""
    if isinstance(source, BaseTool):
        source = source.tool_call_schema
    elif callable(source) and not isinstance(source, type):
        source = _of_function(source)
    if is_typeddict(source):
        schema = TypeAdapter(source).json_schema()
    elif isinstance(source, type) and is_basemodel_subclass(source) and hasattr(source, "model_json_schema"):
        schema = source.model_json_schema()
    elif isinstance(source, Mapping) and "$defs" in source:
        schema = dict(source)
    else:
        return None
    root = schema.get("$ref", "")
    if root.startswith(_DEFINED):
        schema = {**schema["$defs"].get(root.removeprefix(_DEFINED), {}), **schema}
        del schema["$ref"]
    return schema


def _of_function(function: Callable[..., Any]) -> Any:
    try:
        return tool(function).tool_call_schema
    except Exception:  # no docstring, no annotations: LangChain's own conversion says what it makes of it
        return None


def _recursive(schema: Mapping[str, Any]) -> bool:
    """Whether a definition leads back to itself."""
    uses = {name: set(_references(part)) for name, part in schema.get("$defs", {}).items()}
    for _ in uses:
        uses = {name: used.union(*(uses.get(u, set()) for u in used)) for name, used in uses.items()}
    return any(name in used for name, used in uses.items())


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        reference = node.get("$ref")
        if isinstance(reference, str):
            yield reference.removeprefix(_DEFINED)
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from _references(part)


def _untitled(node: Any) -> Any:
    """Without the titles that pydantic makes of names: they cost tokens and say nothing."""
    if isinstance(node, Mapping):
        return {k: _untitled(v) for k, v in node.items() if k != "title" or not isinstance(v, str)}
    return [_untitled(part) for part in node] if isinstance(node, list) else node
