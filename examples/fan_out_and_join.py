"""One brief, several experts at the same time, one editor: a LangGraph graph whose branches fork one KV cache.

python examples/fan_out_and_join.py
python examples/fan_out_and_join.py --model Qwen/Qwen2.5-1.5B-Instruct --task "..."

The experts run at the same time as far as LangGraph is concerned; one model answers one of them after the other.
"""

import argparse
import asyncio

from langchain_core.messages import SystemMessage
from langgraph.graph import START, MessagesState, StateGraph
from rich.console import Console
from transformers.utils import logging

from qkvshare_agents import ChatQKVShare, add_cache_handoff
from qkvshare_agents.errors import QKVShareError
from qkvshare_agents.turns.report import table

INSTRUCTIONS = {
    "planner": "Describe in three sentences what the lamp looks like and how it is used.",
    "buyer": "Say in two sentences who would buy the lamp, and why.",
    "critic": "Say in two sentences what could go wrong with the lamp.",
    "seller": "Write one sentence of advertising for the lamp.",
    "editor": "Write one short paragraph that sums all of this up.",
}
EXPERTS = ["buyer", "critic", "seller"]
TASK = "We want to build a small lamp that runs on sunlight and can be carried in a pocket."


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="local directory, pulled name or Hub id")
    parser.add_argument("--task", default=TASK)
    parser.add_argument("--max-tokens", type=int, default=120, help="per answer")
    parser.add_argument("--precision", default="safe", help="safe (8 bits) or native (exact)")
    parser.add_argument("--no-replay", action="store_true", help="do not time a text replay after every turn")
    return parser.parse_args()


def graph(model: ChatQKVShare) -> StateGraph:
    """planner -> every expert at once -> editor, who waits for all of them."""
    builder = StateGraph(MessagesState)
    for name, instruction in INSTRUCTIONS.items():

        async def answer(state: MessagesState, instruction: str = instruction) -> dict:
            return {"messages": [await model.ainvoke([SystemMessage(instruction), *state["messages"]])]}

        builder.add_node(name, answer)
    builder.add_edge(START, "planner")
    add_cache_handoff(builder, "planner", EXPERTS)
    add_cache_handoff(builder, EXPERTS, "editor")
    return builder


async def main(options: argparse.Namespace) -> None:
    console = Console()
    logging.disable_progress_bar()
    model = ChatQKVShare(
        model=options.model,
        precision=options.precision,
        max_tokens=options.max_tokens,
        measure_replay=not options.no_replay,
    )
    console.print(f"loading {options.model} …", style="dim")
    model.load()
    console.rule("user")
    console.print(options.task, markup=False)
    app = graph(model).compile()
    async for step in app.astream({"messages": [("user", options.task)]}, stream_mode="updates"):
        for name, update in step.items():
            console.rule(name)
            console.print(update["messages"][-1].text, markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(table(model.reports))
    stored = model.shared_host.store.nbytes
    handed = sum(report.payload_bytes for report in model.reports)
    console.print(f"stored in all: {stored / 1e6:.1f} MB; handed over: {handed / 1e6:.1f} MB, by reference")
    model.close()


if __name__ == "__main__":
    try:
        asyncio.run(main(arguments()))  # ctrl-C ends the turns that run; a graph of threads would finish them first
    except QKVShareError as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("\nstopped") from None
