"""OpenTelemetry spans after the GenAI semantic conventions; counts and bytes only, never text.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from qkvshare_agents.host.host import Host
from qkvshare_agents.turns.request import Answer

_tracer = trace.get_tracer("qkvshare")


@contextmanager
def chat_span(host: Host) -> Iterator[Span]:
    """A span `chat MODEL`. An error marks it by its type only: its text may quote the conversation."""
    model = host.settings.model
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "qkvshare",
        "gen_ai.request.model": model,
    }
    span = _tracer.start_span(f"chat {model}", kind=SpanKind.CLIENT, attributes=attributes)
    try:
        yield span
    except BaseException as error:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR))
        raise
    finally:
        span.end()


def describe(span: Span, answer: Answer) -> None:
    """Usage and handoff of a finished turn."""
    report = answer.report
    span.set_attributes(
        {
            "gen_ai.response.finish_reasons": (answer.finish_reason,),
            "gen_ai.usage.input_tokens": answer.prompt_tokens,
            "gen_ai.usage.output_tokens": answer.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": report.reused_tokens,
            "gen_ai.agent.name": report.agent,
            "qkvshare.handoff.mode": report.mode.value,
            "qkvshare.handoff.source": report.source,
            "qkvshare.handoff.reasons": report.reasons,
            "qkvshare.handoff.payload_bytes": report.payload_bytes,
            "qkvshare.handoff.first_token_ms": report.first_token_ms,
        }
    )
