"""Runs a turn for a caller in a thread or in an event loop. However the caller leaves, the turn stops."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from queue import Empty, SimpleQueue

from langchain_core.callbacks import adispatch_custom_event, dispatch_custom_event
from langchain_core.runnables import ensure_config
from opentelemetry.trace import Span

from qkvshare_adapters import telemetry
from qkvshare_agents.host.host import Host
from qkvshare_agents.turns.request import Answer, Turn

EVENT = "kv_handoff"  # the name of the custom event after each turn


def answer(host: Host, turn: Turn, timeout: float | None) -> Answer:
    """The answer to `turn`. Raises TimeoutError after `timeout` seconds."""
    with _call(host) as (span, cancelled), _named_timeout(timeout):
        done = host.submit(turn, cancelled=cancelled).result(timeout)
        telemetry.describe(span, done)
    _dispatch(done)
    return done


async def aanswer(host: Host, turn: Turn, timeout: float | None) -> Answer:
    """`answer` for event loops: cancelling the task stops the turn before its next token."""
    with _call(host) as (span, cancelled), _named_timeout(timeout):
        running = asyncio.wrap_future(host.submit(turn, cancelled=cancelled))
        done = await asyncio.wait_for(running, timeout)
        telemetry.describe(span, done)
    await _adispatch(done)
    return done


def pieces(host: Host, turn: Turn, timeout: float | None) -> Iterator[str | Answer]:
    """The answer's text piece by piece, then the answer. Closing the iterator stops the turn."""
    arrived: SimpleQueue[str | None] = SimpleQueue()
    deadline = time.monotonic() + timeout if timeout else None
    with _call(host) as (span, cancelled), _named_timeout(timeout):
        running = host.submit(turn, on_text=arrived.put, cancelled=cancelled)
        running.add_done_callback(lambda _: arrived.put(None))
        try:
            while (piece := arrived.get(timeout=_left(deadline))) is not None:
                yield piece
        except Empty:
            raise TimeoutError from None
        done = running.result()
        telemetry.describe(span, done)
    _dispatch(done)
    yield done


async def apieces(host: Host, turn: Turn, timeout: float | None) -> AsyncGenerator[str | Answer, None]:
    """`pieces` for event loops."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Queue[str | None]()
    deadline = time.monotonic() + timeout if timeout else None

    def pass_on(piece: str | None) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop is closed: nobody listens
            loop.call_soon_threadsafe(arrived.put_nowait, piece)

    with _call(host) as (span, cancelled), _named_timeout(timeout):
        running = host.submit(turn, on_text=pass_on, cancelled=cancelled)
        running.add_done_callback(lambda _: pass_on(None))
        while (piece := await asyncio.wait_for(arrived.get(), _left(deadline))) is not None:
            yield piece
        done = running.result()
        telemetry.describe(span, done)
    await _adispatch(done)
    yield done


@contextlib.contextmanager
def _call(host: Host) -> Iterator[tuple[Span, threading.Event]]:
    """A span, and an event that stops the turn on the host's thread however the caller leaves."""
    cancelled = threading.Event()
    try:
        with telemetry.chat_span(host) as span:
            yield span, cancelled
    finally:
        cancelled.set()


@contextlib.contextmanager
def _named_timeout(seconds: float | None) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        if str(error) or seconds is None:
            raise
        raise TimeoutError(f"no answer within {seconds} s; raise `timeout`, or lower `max_tokens`") from None


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _dispatch(done: Answer) -> None:
    """Tell tracing what was handed over: counts, bytes, times; never text. Outside of a run nobody listens."""
    if _in_run():
        dispatch_custom_event(EVENT, _event(done))


async def _adispatch(done: Answer) -> None:
    if _in_run():
        await adispatch_custom_event(EVENT, _event(done))


def _event(done: Answer) -> dict[str, object]:
    return {**done.report.to_dict(), "handle": done.handle}


def _in_run() -> bool:
    return getattr(ensure_config().get("callbacks"), "parent_run_id", None) is not None
