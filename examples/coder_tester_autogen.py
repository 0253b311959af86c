"""A coder and a tester in an AutoGen team, on one local model that hands its KV cache from one to the other.

python examples/coder_tester_autogen.py
python examples/coder_tester_autogen.py --model Qwen/Qwen2.5-1.5B-Instruct --turns 4 --task "..."
"""

import argparse
import asyncio
import logging
import signal

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from qkvshare_agents import QKVShareClient
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
    parser.add_argument("--layout", default="relay", help="relay, or stock for AutoGen's own message order")
    parser.add_argument("--no-replay", action="store_true", help="do not time a text replay after every turn")
    return parser.parse_args()


def stops_with_ctrl_c() -> CancellationToken:
    """A token for a team's run. A run that is cancelled without it goes through all of its turns first."""
    token = CancellationToken()

    def stop() -> None:
        logging.getLogger("autogen_core").setLevel(logging.CRITICAL)  # it logs the turn that ends, with a traceback
        token.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop)
    return token


async def main(options: argparse.Namespace) -> None:
    console = Console()
    disable_progress_bar()
    client = QKVShareClient(
        options.model,
        precision=options.precision,
        layout=options.layout,
        max_tokens=options.max_tokens,
        measure_replay=not options.no_replay,
    )
    console.print(f"loading {options.model} …", style="dim")
    await client.load()
    coder = AssistantAgent("coder", client, system_message=CODER, model_client_stream=True)
    tester = AssistantAgent("tester", client, system_message=TESTER, model_client_stream=True)
    team = RoundRobinGroupChat([coder, tester], max_turns=options.turns)
    speaker = "user"
    console.rule(speaker)
    console.print(options.task, markup=False)
    token = stops_with_ctrl_c()
    async for event in team.run_stream(task=options.task, cancellation_token=token):
        if type(event).__name__ == "ModelClientStreamingChunkEvent":
            if event.source != speaker:
                speaker = event.source
                console.print()
                console.rule(speaker)
            console.print(event.content, end="", markup=False, highlight=False, soft_wrap=True)
    console.print("\n")
    console.print(table(client.reports))
    await client.close()


if __name__ == "__main__":
    try:
        asyncio.run(main(arguments()))
    except QKVShareError as error:
        raise SystemExit(f"error: {error}") from error
    except (asyncio.CancelledError, KeyboardInterrupt):
        raise SystemExit("\nstopped") from None
    except RuntimeError as error:  # a team raises what its agents met as RuntimeError: the text, then a traceback
        raise SystemExit(f"error: {str(error).splitlines()[0]}") from error
