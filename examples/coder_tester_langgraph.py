"""A coder and a tester in a LangGraph graph, on one local model that hands its KV cache from one to the other.

python examples/coder_tester_langgraph.py
python examples/coder_tester_langgraph.py --model Qwen/Qwen2.5-1.5B-Instruct --turns 4 --task "..."
"""

import argparse
import asyncio

from langchain.agents import create_agent
from langgraph.graph import END, START, MessagesState, StateGraph
from rich.console import Console
from transformers.utils import logging

from qkvshare_agents import ChatQKVShare, add_cache_handoff
from qkvshare_agents.errors import QKVShareError
from qkvshare_agents.turns.report import table

CODER = "Write the function, with a short docstring and nothing else."
TESTER = (
    "Now write a test for this function: a function named test_ that calls it with three inputs "
    "and asserts the results."
)
TASK = "Write a Python function is_even(n) that returns True if n is even."


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="local directory, pulled name or Hub id")
    parser.add_argument("--task", default=TASK)
    parser.add_argument("--turns", type=int, default=4, help="answers in all")
    parser.add_argument("--max-tokens", type=int, default=220, help="per answer")
    parser.add_argument("--precision", default="safe", help="safe (8 bits) or native (exact)")
    parser.add_argument("--isolated", action="store_true", help="plain edges: nothing passes between the agents")
    parser.add_argument("--no-replay", action="store_true", help="do not time a text replay after every turn")
    return parser.parse_args()


def graph(model: ChatQKVShare, turns: int, isolated: bool) -> StateGraph:
    """coder -> tester -> coder ..., until there are `turns` answers."""
    builder = StateGraph(MessagesState)
    builder.add_node("coder", create_agent(model, system_prompt=CODER, name="coder"))
    builder.add_node("tester", create_agent(model, system_prompt=TESTER, name="tester"))
    builder.add_edge(START, "coder")
    for source, target in (("coder", "tester"), ("tester", "coder")):

        def go_on(state: MessagesState, target: str = target) -> str:
            return END if len(state["messages"]) > turns else target

        builder.add_conditional_edges(source, go_on, [target, END])
        if not isolated:
            add_cache_handoff(builder, source, target, dynamic=True)
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
    app = graph(model, options.turns, options.isolated).compile()
    console.rule("user")
    console.print(options.task, markup=False)
    speaker, message_id = "user", None
    stream = app.astream({"messages": [("user", options.task)]}, stream_mode="messages", subgraphs=True)
    async for _, (chunk, metadata) in stream:
        if chunk.id != message_id:
            speaker, message_id = metadata["lc_agent_name"], chunk.id
            console.print()
            console.rule(speaker)
        console.print(chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
    console.print("\n")
    console.print(table(model.reports))
    model.close()


if __name__ == "__main__":
    try:
        asyncio.run(main(arguments()))  # ctrl-C ends the turn that runs; a graph of threads would finish it first
    except QKVShareError as error:
        raise SystemExit(f"error: {error}") from error
    except KeyboardInterrupt:
        raise SystemExit("\nstopped") from None
