"""A coder and a tester on two machines: AutoGen's distributed runtime carries the messages, Redis the KV.

python examples/across_machines.py --redis redis://localhost:6379/0     # all on one machine, in three processes

Apart, with the same QKVSHARE_SECRET everywhere, --redis rediss://... (TLS), and --address of AutoGen's host, whose
gRPC has no encryption and no authentication: --role coder and --role tester on two machines, then --role host.
"""

import argparse
import asyncio
import json
import os
import secrets
import sys
from dataclasses import dataclass

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.messages import TextMessage
from autogen_core import AgentId, MessageContext, RoutedAgent, message_handler, try_get_known_serializers_for_type
from autogen_ext.runtimes.grpc import GrpcWorkerAgentRuntime, GrpcWorkerAgentRuntimeHost

from qkvshare_agents import QKVShareClient

INSTRUCTIONS = {"coder": "Write the function and nothing else.", "tester": "Now write a test for this function."}
TASK = "Write a Python function is_even(n) that returns True if n is even."


@dataclass
class Asked:
    texts: list[str]  # what was said since this member's last turn
    sources: list[str]  # by whom


@dataclass
class Answered:
    text: str
    report: str


class Member(RoutedAgent):
    """AutoGen's own agent, at an address that other machines reach."""

    def __init__(self, role: str, client: QKVShareClient) -> None:
        super().__init__(f"the {role}")
        self._client = client
        self._agent = AssistantAgent(role, client, system_message=INSTRUCTIONS[role])

    @message_handler
    async def on_asked(self, message: Asked, ctx: MessageContext) -> Answered:
        said = [TextMessage(content=t, source=s) for t, s in zip(message.texts, message.sources, strict=True)]
        response = await self._agent.on_messages(said, ctx.cancellation_token)
        return Answered(response.chat_message.to_text(), json.dumps(self._client.reports[-1].to_dict()))


async def connect(address: str) -> GrpcWorkerAgentRuntime:
    runtime = GrpcWorkerAgentRuntime(address.replace("0.0.0.0", "localhost"))
    for kind in (Asked, Answered):
        runtime.add_message_serializer(try_get_known_serializers_for_type(kind))
    await runtime.start()
    return runtime


async def work(role: str, options: argparse.Namespace) -> None:
    os.environ["QKVSHARE_SHARE"] = options.redis
    client = QKVShareClient(options.model, members=INSTRUCTIONS, measure_replay=True, max_tokens=120)
    await client.load()  # now, so that no turn waits for it
    runtime = await connect(options.address)
    await Member.register(runtime, role, lambda: Member(role, client))
    print("ready", flush=True)
    await runtime.stop_when_signal()


async def ask(address: str) -> None:
    runtime = await connect(address)
    texts, sources = [TASK], ["user"]
    for name in INSTRUCTIONS:
        said = await runtime.send_message(Asked(texts, sources), AgentId(name, "default"))
        texts, sources, r = [*texts, said.text], [*sources, name], json.loads(said.report)
        print(f"[{name}] {said.text}\n\n-- {r['mode']}: {r['reused_tokens']} of {r['prompt_tokens']} tokens", end=" ")
        print(f"reused, fetched in {r['transfer_ms']:.0f} ms; first token after {r['first_token_ms']:.0f} ms,", end=" ")
        print(f"by text replay {r['replay_first_token_ms']:.0f} ms; {r['reasons']} --\n")
    await runtime.stop()


async def main(options: argparse.Namespace) -> None:
    os.environ.setdefault("QKVSHARE_SECRET", secrets.token_hex(32))  # workers started here inherit both
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    host = GrpcWorkerAgentRuntimeHost(options.address)
    host.start()
    shared = ["--address", options.address, "--redis", options.redis, "--model", options.model]
    workers = []
    for role in INSTRUCTIONS if not options.role else ():
        command = [os.path.abspath(__file__), "--role", role, *shared]
        workers.append(await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE))
    try:
        for worker in workers:
            if await worker.stdout.readline() != b"ready\n":
                raise SystemExit("error: a worker ended before it was ready")
        await asyncio.wait_for(ask(options.address), 600)
    finally:
        for worker in workers:
            worker.kill()
        await host.stop(grace=1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", default="redis://localhost:6379/0", help="a Redis or Valkey server, see redis-py")
    parser.add_argument("--address", default="localhost:50051", help="of AutoGen's gRPC host")
    parser.add_argument("--model", default="smollm2-135m", help="local directory, pulled name or Hub id")
    parser.add_argument("--role", choices=[*INSTRUCTIONS, "host"], help="without it, all three are started here")
    options = parser.parse_args()
    try:
        asyncio.run(work(options.role, options) if options.role in INSTRUCTIONS else main(options))
    except KeyboardInterrupt:
        raise SystemExit("\nstopped") from None
