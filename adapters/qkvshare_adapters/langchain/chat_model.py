"""LangChain chat model: the agents of a LangGraph graph continue from each other's KV along annotated edges.

    model = ChatQKVShare(model="smollm2-135m")
    builder.add_node("coder", lambda state: {"messages": [model.invoke(state["messages"])]})
    add_cache_handoff(builder, "coder", "tester")

One object may serve all agents, or each has its own: objects with equal settings, or the same `host` name,
share one loaded model and its pages. The object itself holds names and settings only, so that it can be
copied, pickled and serialised.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ClassVar, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from pydantic import ConfigDict, Field, field_validator

from qkvshare_adapters.langchain import run
from qkvshare_adapters.langchain.caller import find_caller, run_metadata
from qkvshare_adapters.langchain.members import speaker
from qkvshare_adapters.langchain.messages import (
    allowed_tools,
    json_schema,
    parallel_calls,
    split_instruction,
    to_message,
    to_messages,
    to_schemas,
)
from qkvshare_adapters.langchain.options import ChatOptions
from qkvshare_adapters.langchain.stream import to_chunk
from qkvshare_adapters.langchain.structured import structured
from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.host.host import Host
from qkvshare_agents.host.registry import drop_host, keep_host
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.report import HandoffReport
from qkvshare_agents.turns.request import Answer, Turn

_HOST_FIELDS = [f.name for f in fields(HostSettings) if f.repr]  # the others are secret and come from the environment
_SAMPLING_FIELDS = [f.name for f in fields(Sampling)]
_CALL_OPTIONS = ("tools", "tool_choice", "response_format", "parallel_tool_calls", "agent", "model", *_SAMPLING_FIELDS)
_LANGCHAINS_OPTIONS = ("stream", "ls_structured_output_format")  # for LangChain itself, or for tracing


class ChatQKVShare(ChatOptions, BaseChatModel):
    """A local model whose KV cache passes from agent to agent.

    model: local directory, pulled name or Hub id. host: name of the shared host; by default one per settings.
    agent: whose calls these are, if that is not the running node's. members: instructions of agents by name, so that
    prompts are the same before and after a restart; otherwise they are learnt as calls come. policy: "all" lets
    all agents of a thread share KV and cues, without annotations. timeout: seconds for one answer. The other
    options are those of `HostSettings` and of `Sampling`. Accepted because every chat model has them, without
    effect here: max_retries, api_key. The tenant's salt and the secret are read from QKVSHARE_SALT and
    QKVSHARE_SECRET, so that no dump holds them.

    Raises TypeError for an unknown option, InvalidSetting for a bad value, HostConflict on the first call if
    `host` is open with other settings. The model loads on the first call or by `load`.
    """

    model: str = "smollm2-135m"
    host: str | None = None
    agent: str | None = None
    members: dict[str, str] = Field(default_factory=dict, repr=False)
    policy: Literal["all"] | None = None

    timeout: float | None = None
    streaming: bool = False
    max_retries: int | None = None
    api_key: Any = Field(default=None, exclude=True, repr=False)

    model_config: ClassVar[ConfigDict] = ConfigDict(populate_by_name=True)

    def __init__(self, **options: Any) -> None:
        known = {*type(self).model_fields, "stop_sequences"}
        if unknown := sorted(options.keys() - known):
            raise TypeError(f"unknown option {', '.join(unknown)}; the options are {', '.join(sorted(known))}")
        super().__init__(**options)
        _ = self.settings, self._sampling(None, {})  # their errors name the valid choices

    @field_validator("api_key", mode="before")
    @classmethod
    def _drop_key(cls, _: Any) -> None:
        """A local model has no keys: what was given for another provider is not kept."""

    @property
    def settings(self) -> HostSettings:
        """What the shared host is opened with."""
        return HostSettings(**{name: getattr(self, name) for name in _HOST_FIELDS})

    @property
    def shared_host(self) -> Host:
        """The host that all objects with these settings share, for its reports and its store."""
        return keep_host(self.settings, self.host)

    @property
    def reports(self) -> list[HandoffReport]:
        """What each turn of every agent on the host cost, oldest first."""
        return list(self.shared_host.reports)

    def load(self) -> None:
        """Load the model now rather than on the first call."""
        self.shared_host.load()

    def close(self) -> None:
        """Free the model and its pages, unless AutoGen clients use them, too. A later call loads anew."""
        drop_host(self.settings, self.host)

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: Any = None, strict: bool | None = None, **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let answers call tools. tool_choice: "auto", "any", "none" or a tool's name; parallel_tool_calls: False ends
        an answer after its first call. A forced call is a single one, enforced token by token, strict or not; others
        are written freely, so that strict=True needs a forced call and is an InvalidSetting without."""
        schemas = to_schemas(tools)
        if strict and not allowed_tools(schemas, tool_choice)[1] and "response_format" not in kwargs:
            raise InvalidSetting("strict=True needs a forced call: tool_choice 'any' or a tool's name, or strict=None")
        parallel_calls(kwargs.get("parallel_tool_calls"))
        allowed_tools(schemas, tool_choice)
        return self.bind(tools=list(schemas), tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Answers that follow `schema`, enforced token by token with every method, and parsed.

        schema: pydantic class, TypedDict, JSON schema or OpenAI function; None only with json_mode. include_raw:
        a dict of raw, parsed and parsing_error instead. Raises InvalidSetting for an unknown method.
        """
        if kwargs:
            raise TypeError(f"unknown option {', '.join(kwargs)}; the options are method, include_raw, strict")
        return structured(self, schema, method=method, include_raw=include_raw)

    def get_token_ids(self, text: str) -> list[int]:
        """Ids of plain text in the model's own tokenizer. Loads the model."""
        return list(self.shared_host.engine.template.encoder.text(text))

    def get_num_tokens_from_messages(self, messages: Sequence[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages would become, delimiters and shared text included."""
        turn, host = self._turn(messages, None, {"tools": tools or ()}, {}, learn=False)
        return len(host.prompt(turn).ids)

    @property
    def _llm_type(self) -> str:
        return "qkvshare-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that can change an answer: LangChain's global cache of answers is keyed by it."""
        names = ("model", "host", "agent", "members", "policy", *_HOST_FIELDS, *_SAMPLING_FIELDS)
        return {name: getattr(self, name) for name in names}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or self.stop, **kwargs)
        return LangSmithParams(**{**params, "ls_provider": "qkvshare"})

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        turn, host = self._turn(messages, stop, kwargs, run_metadata(run_manager))
        return _result(run.answer(host, turn, self.timeout), host)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        turn, host = self._turn(messages, stop, kwargs, run_metadata(run_manager))
        return _result(await run.aanswer(host, turn, self.timeout), host)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        turn, host = self._turn(messages, stop, kwargs, run_metadata(run_manager))
        for piece in run.pieces(host, turn, self.timeout):
            chunk = to_chunk(piece, host.settings.model)
            if run_manager:
                run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        turn, host = self._turn(messages, stop, kwargs, run_metadata(run_manager))
        async with contextlib.aclosing(run.apieces(host, turn, self.timeout)) as pieces:
            async for piece in pieces:
                chunk = to_chunk(piece, host.settings.model)
                if run_manager:
                    await run_manager.on_llm_new_token(str(chunk.text), chunk=chunk)
                yield chunk

    def _sampling(self, stop: Sequence[str] | None, options: Mapping[str, Any]) -> Sampling:
        own = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        told = {name: value for name, value in options.items() if name in _SAMPLING_FIELDS}
        return Sampling(**{**own, **({} if stop is None else {"stop": stop}), **told})

    def _turn(
        self,
        messages: Sequence[BaseMessage],
        stop: Sequence[str] | None,
        options: Mapping[str, Any],
        metadata: Mapping[str, Any],
        *,
        learn: bool = True,
    ) -> tuple[Turn, Host]:
        """A call as a turn of the calling agent, and the host that runs it. `options` come with the call."""
        options = {name: value for name, value in options.items() if name not in _LANGCHAINS_OPTIONS}
        if unknown := sorted(options.keys() - set(_CALL_OPTIONS)):
            raise TypeError(f"unknown option {', '.join(unknown)}; a call's options are {', '.join(_CALL_OPTIONS)}")
        model = options.get("model") or self.model
        host = keep_host(replace(self.settings, model=model), self.host if model == self.model else None)
        instruction, rest = split_instruction(messages)
        told = options.get("agent") or self.agent
        everyone = self.policy == "all"
        caller = find_caller(metadata, told=told, instruction=instruction, share_all=everyone, layout=self.layout)
        schemas = to_schemas(options.get("tools") or ())
        seen = to_messages(rest, caller, host.ledger)
        tools, must_call = allowed_tools(schemas, options.get("tool_choice"))
        return Turn(
            speaker(host, caller, instruction, schemas, self.members, learn=learn),
            caller.scope,
            seen,
            self._sampling(stop, options),
            tools,
            must_call=must_call,
            parallel_calls=parallel_calls(options.get("parallel_tool_calls")),
            schema=json_schema(options.get("response_format")),
            view=caller.view,
            access=caller.with_notice(rest, seen),
        ), host


def _result(answer: Answer, host: Host) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=to_message(answer, host.settings.model))])
