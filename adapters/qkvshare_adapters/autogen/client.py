"""AutoGen model client: the agents of a team continue from each other's KV.

    client = QKVShareClient(model="smollm2-135m")
    team = RoundRobinGroupChat([AssistantAgent("coder", client, ...), AssistantAgent("tester", client, ...)])

One client may serve a whole team, or one client each: clients with equal settings, or the same `host` name,
share one loaded model and its pages.
"""

import asyncio
import contextlib
import importlib.util
import logging
import threading
import warnings
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, cast

from autogen_core import EVENT_LOGGER_NAME, CancellationToken, Component
from autogen_core.logging import LLMCallEvent, LLMStreamEndEvent, LLMStreamStartEvent
from autogen_core.models import (
    ChatCompletionClient,
    CreateResult,
    LLMMessage,
    ModelFamily,
    ModelInfo,
    RequestUsage,
)
from autogen_core.tools import Tool, ToolSchema
from opentelemetry.trace import Span
from pydantic import BaseModel

from qkvshare_adapters import telemetry
from qkvshare_adapters.autogen.caller import find_caller
from qkvshare_adapters.autogen.messages import (
    ToolChoice,
    allowed_tools,
    dump_messages,
    event_fields,
    json_schema,
    last_speaker,
    parallel_calls,
    split_instruction,
    to_messages,
    to_result,
    to_schemas,
)
from qkvshare_agents.errors import Cancelled
from qkvshare_agents.host.host import Host
from qkvshare_agents.host.registry import open_host, release_host
from qkvshare_agents.prompt.members import Member
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.turns.report import HandoffReport
from qkvshare_agents.turns.request import Answer, Turn

_logger = logging.getLogger(EVENT_LOGGER_NAME)
_HOST_OPTIONS = [f.name for f in fields(HostSettings) if f.repr and f.name != "model"]
_SAMPLING_OPTIONS = [f.name for f in fields(Sampling)]
_CALL_OPTIONS = [*_SAMPLING_OPTIONS, "parallel_tool_calls"]


class QKVShareClientConfig(BaseModel):
    """What `dump_component` writes. options: fields of HostSettings and Sampling that were set."""

    model: str
    host: str | None = None
    agent: str | None = None
    members: dict[str, str] = {}
    model_info: dict[str, Any] = {}
    options: dict[str, Any] = {}


class QKVShareChatCompletionClient(ChatCompletionClient, Component[QKVShareClientConfig]):
    """A local model whose KV cache passes from agent to agent.

    model: local directory, pulled name or Hub id. host: name of the shared host; by default one per settings.
    agent: whose calls these are, if the runtime can't tell (see `for_agent`). members: instructions of agents
    by name, so that prompts are the same before and after a restart; otherwise they are learnt as calls come.
    model_info: entries to override, such as `family`. options: fields of `HostSettings` (precision,
    budget_bytes, layout, ...), of `Sampling` (temperature, max_tokens, stop, seed, ...), and parallel_tool_calls:
    False ends an answer after its first call. The tenant's salt and the secret are read from QKVSHARE_SALT and
    QKVSHARE_SECRET, so that no dumped config holds them.

    Raises TypeError for an unknown option, InvalidSetting for a bad value, HostConflict if `host` is open with
    other settings. The model loads on the first call or by `load`.
    """

    component_type: ClassVar[Any] = "model"
    component_config_schema = QKVShareClientConfig
    component_provider_override = "qkvshare_agents.QKVShareClient"

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        host: str | None = None,
        agent: str | None = None,
        members: Mapping[str, str] | None = None,
        model_info: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if unknown := sorted(set(options) - {*_HOST_OPTIONS, *_CALL_OPTIONS}):
            choices = ", ".join([*_HOST_OPTIONS, *_CALL_OPTIONS])
            raise TypeError(f"unknown option {', '.join(unknown)}; the options are {choices}")
        self._config = QKVShareClientConfig(
            model=model,
            host=host,
            agent=agent,
            members=dict(members or {}),
            model_info=dict(model_info or {}),
            options=options,
        )
        self._settings = HostSettings(model, **{k: v for k, v in options.items() if k in _HOST_OPTIONS})
        self._sampling = Sampling(**{k: v for k, v in options.items() if k in _SAMPLING_OPTIONS})
        self._parallel_calls = parallel_calls(options.get("parallel_tool_calls"))
        self._host = open_host(self._settings, host)
        self._closed = False
        self._usage = RequestUsage(0, 0)

    @property
    def host(self) -> Host:
        """The shared host, for its reports and its store."""
        return self._host

    @property
    def reports(self) -> list[HandoffReport]:
        """What each turn of every agent on the host cost, oldest first."""
        return list(self._host.reports)

    async def load(self) -> None:
        """Load the model now rather than on the first call, where a team would hide the error's type."""
        await asyncio.to_thread(self._host.load)

    def for_agent(self, name: str) -> "QKVShareChatCompletionClient":
        """The same client for one agent by name: needed where nothing tells who is calling (a bare `create()`, or one
        in another thread)."""
        return self._from_config(self._config.model_copy(update={"agent": name}))

    async def create(
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[Tool | ToolSchema] = [],
        tool_choice: ToolChoice = "auto",
        json_output: bool | type[BaseModel] | None = None,
        extra_create_args: Mapping[str, Any] = {},
        cancellation_token: CancellationToken | None = None,
    ) -> CreateResult:
        """One answer. extra_create_args: fields of `Sampling` and parallel_tool_calls; others are a TypeError."""
        turn = self._turn(messages, tools, tool_choice, json_output, extra_create_args)
        with _call(self._host, cancellation_token) as (span, cancelled):
            future = asyncio.wrap_future(self._host.submit(turn, cancelled=cancelled))
            if cancellation_token:
                cancellation_token.link_future(future)
            answer = await future
            telemetry.describe(span, answer)
        result = self._finish(answer)
        _logger.info(LLMCallEvent(messages=dump_messages(messages), **event_fields(result, answer)))
        return result

    async def create_stream(
        self,
        messages: Sequence[LLMMessage],
        *,
        tools: Sequence[Tool | ToolSchema] = [],
        tool_choice: ToolChoice = "auto",
        json_output: bool | type[BaseModel] | None = None,
        extra_create_args: Mapping[str, Any] = {},
        cancellation_token: CancellationToken | None = None,
    ) -> AsyncGenerator[str | CreateResult, None]:
        """The answer piece by piece, then its CreateResult. Leaving the loop early stops the turn."""
        turn = self._turn(messages, tools, tool_choice, json_output, extra_create_args)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | None]()

        def pass_on(piece: str | None) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody listens
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        _logger.info(LLMStreamStartEvent(messages=dump_messages(messages)))
        with _call(self._host, cancellation_token) as (span, cancelled):
            running = self._host.submit(turn, on_text=pass_on, cancelled=cancelled)
            running.add_done_callback(lambda _: pass_on(None))
            if cancellation_token:
                cancellation_token.add_callback(lambda: pass_on(None))
            while (piece := await pieces.get()) is not None:
                yield piece
            if cancelled.is_set():
                raise Cancelled("the stream was cancelled")
            answer = running.result()
            telemetry.describe(span, answer)
        result = self._finish(answer)
        _logger.info(LLMStreamEndEvent(**event_fields(result, answer)))
        yield result

    def count_tokens(self, messages: Sequence[LLMMessage], *, tools: Sequence[Tool | ToolSchema] = []) -> int:
        """Tokens of the prompt that these messages would become, delimiters and shared text included."""
        return len(self._host.prompt(self._turn(messages, tools, "auto", None, {}, learn=False)).ids)

    def remaining_tokens(self, messages: Sequence[LLMMessage], *, tools: Sequence[Tool | ToolSchema] = []) -> int:
        """Context left behind the prompt; negative when the prompt is too long, which trimming contexts need."""
        return self._host.context_tokens - self.count_tokens(messages, tools=tools)

    def actual_usage(self) -> RequestUsage:
        return self.total_usage()

    def total_usage(self) -> RequestUsage:
        """Whole prompts and completions of this client so far; `reports` says how much of them was reused."""
        return RequestUsage(self._usage.prompt_tokens, self._usage.completion_tokens)

    @property
    def model_info(self) -> ModelInfo:
        structured = importlib.util.find_spec("llguidance") is not None
        info: Any = {
            "vision": False,
            "function_calling": True,
            "json_output": structured,
            "structured_output": structured,
            "family": ModelFamily.UNKNOWN,
            "multiple_system_messages": True,
            **self._config.model_info,
        }
        return cast(ModelInfo, info)

    @property
    def capabilities(self) -> Any:
        warnings.warn("capabilities is deprecated, use model_info", DeprecationWarning, stacklevel=2)
        return {key: self.model_info[key] for key in ("vision", "function_calling", "json_output")}

    async def close(self) -> None:
        """End this client's use of the host; the last client frees the model and its pages."""
        if not self._closed:
            self._closed = True
            await asyncio.to_thread(release_host, self._settings, self._config.host)

    def _to_config(self) -> QKVShareClientConfig:
        return self._config.model_copy(deep=True)

    @classmethod
    def _from_config(cls, config: QKVShareClientConfig) -> "QKVShareChatCompletionClient":
        kept = config.model_dump(exclude={"options"})
        return cls(**kept, **config.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "QKVShareChatCompletionClient":
        return self._from_config(self._to_config())

    def _turn(
        self,
        messages: Sequence[LLMMessage],
        tools: Sequence[Tool | ToolSchema],
        tool_choice: ToolChoice,
        json_output: bool | type[BaseModel] | None,
        extra: Mapping[str, Any],
        *,
        learn: bool = True,
    ) -> Turn:
        options = dict(extra)
        several = parallel_calls(options.pop("parallel_tool_calls", self._parallel_calls))
        sampling = self._override(options)
        instruction, rest = split_instruction(messages)
        schemas = to_schemas(tools)
        allowed = allowed_tools(schemas, tool_choice)
        forced = tool_choice == "required" or not isinstance(tool_choice, str)
        schema, converted = json_schema(json_output), to_messages(rest)
        speaker, scope = self._speaker(rest, instruction, schemas, learn)
        return Turn(
            speaker, scope, converted, sampling, allowed, must_call=forced, parallel_calls=several, schema=schema
        )

    def _override(self, options: dict[str, Any]) -> Sampling:
        if unknown := sorted(options.keys() - set(_SAMPLING_OPTIONS)):
            choices = ", ".join(_CALL_OPTIONS)
            raise TypeError(f"unknown option {', '.join(unknown)}; extra_create_args may hold {choices}")
        return self._sampling.override(options)

    def _speaker(
        self, messages: Sequence[LLMMessage], instruction: str, tools: tuple[dict[str, Any], ...], learn: bool
    ) -> tuple[Member, str]:
        caller, roster = find_caller(), self._host.roster
        scope, told, last = caller.scope, self._config.agent or caller.name, last_speaker(messages)
        if not learn:
            name = told or caller.running or last or ""
            known = roster.members(scope).get(name)
            return Member(name, name, instruction or (known.instruction if known else ""), tools), scope
        for name, declared in self._config.members.items():
            if name not in roster.members(scope):
                roster.learn(scope, name, declared)
        name, named = roster.identify(scope, instruction, tools, told=told, running=caller.running, last=last)
        return roster.learn(scope, name, instruction, tools, named=named), scope

    def _finish(self, answer: Answer) -> CreateResult:
        self._usage.prompt_tokens += answer.prompt_tokens
        self._usage.completion_tokens += answer.completion_tokens
        return to_result(answer)


@contextlib.contextmanager
def _call(host: Host, token: CancellationToken | None) -> Iterator[tuple[Span, threading.Event]]:
    """A span, and an event that stops the turn on the host's thread however the caller leaves."""
    cancelled = threading.Event()
    if token:
        token.add_callback(cancelled.set)
    try:
        with telemetry.chat_span(host) as span:
            yield span, cancelled
    except Cancelled as error:
        raise asyncio.CancelledError(str(error)) from error
    finally:
        cancelled.set()


QKVShareClient = QKVShareChatCompletionClient
