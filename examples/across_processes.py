"""A coder and a tester in two processes, each with a model of its own; the KV goes through shared memory.

python examples/across_processes.py
python examples/across_processes.py --kill coder     # or tester: kill -9 when it has answered, or while it works
"""

import argparse
import json
import os
import secrets
import subprocess
import sys

from qkvshare_agents import Courier, Host, HostSettings, Message, Sampling, Turn
from qkvshare_agents.errors import QKVShareError
from qkvshare_agents.transport.shm import ShmTransport
from qkvshare_agents.turns.report import Arrival

INSTRUCTIONS = {
    "coder": "Write the function, with a short docstring and nothing else.",
    "tester": "Now write a test for this function: a function named test_ that calls it with three inputs.",
}
TASK = "Write a Python function is_even(n) that returns True if n is even."


def work(role: str, model: str) -> None:
    """One process: takes a conversation and a package's key per line, says what it received, then its answer."""
    host = Host(HostSettings(model, measure_replay=True))
    for name, instruction in INSTRUCTIONS.items():
        host.roster.learn("", name, instruction)
    courier = Courier(host, ShmTransport(), deadline_ms=2000)
    members = host.roster.members("")

    def say(**fields: object) -> None:
        print(json.dumps(fields), flush=True)

    say(event="ready", model=host.engine.name)  # loaded now, so that no turn waits for it
    for line in sys.stdin:
        asked = json.loads(line)
        messages = tuple(Message(*fields) for fields in asked["messages"])
        # keep: if this process dies before it has answered, the next one can take the same package
        arrival = courier.receive(asked["key"], keep=True) if role == "tester" else Arrival()
        say(event="received", moved_bytes=arrival.moved_bytes, transfer_ms=arrival.transfer_ms)
        turn = Turn(members[role], "", messages, Sampling(max_tokens=120), arrival=arrival)
        answer = host.submit(turn).result()
        messages += (Message("assistant", answer.text, role),)
        key = courier.send(Turn(members["tester"], "", messages)).key if role == "coder" else ""
        say(event="answered", text=answer.text, report=answer.report.to_dict(), key=key)


class Worker:
    """A process that works."""

    def __init__(self, role: str, model: str) -> None:
        self.role, command = role, [sys.executable, os.path.abspath(__file__), "--role", role, "--model", model]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, **fields: object) -> None:
        print(json.dumps(fields), file=self._process.stdin, flush=True)

    def hear(self, event: str) -> dict:
        assert self._process.stdout
        said = json.loads(self._process.stdout.readline() or '{"event": "died"}')
        if said["event"] != event:
            raise SystemExit(f"error: the {self.role} {said['event']} where it should have {event}")
        return said

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def main(model: str, kill: str | None) -> None:
    # The workers inherit these, and sign with the secret
    os.environ |= {"QKVSHARE_SECRET": secrets.token_hex(32), "HF_HUB_DISABLE_PROGRESS_BARS": "1"} | os.environ
    coder, tester = Worker("coder", model), Worker("tester", model)
    try:
        _ = coder.hear("ready"), tester.hear("ready")
        messages = [["user", TASK, "user"]]
        coder.tell(messages=messages)
        coder.hear("received")
        first = coder.hear("answered")
        show("coder", first)
        if kill == "coder":
            coder.kill()
            print("-- the coder was killed --\n")
        messages.append(["assistant", first["text"], "coder"])
        tester.tell(messages=messages, key=first["key"])
        received = tester.hear("received")
        if kill == "tester":
            tester.kill()
            print("-- the tester was killed while it worked; another one takes over --\n")
            tester = Worker("tester", model)
            tester.hear("ready")
            tester.tell(messages=messages, key=first["key"])
            received = tester.hear("received")
        print(f"-- {received['moved_bytes'] / 1e6:.1f} MB came over in {received['transfer_ms']:.1f} ms --\n")
        show("tester", tester.hear("answered"))
        ShmTransport().delete(first["key"])
    finally:
        _ = coder.kill(), tester.kill()


def show(role: str, answered: dict) -> None:
    r = answered["report"]
    print(f"[{role}] {answered['text']}\n")
    print(f"-- {r['mode']}: {r['reused_tokens']} of {r['prompt_tokens']} tokens reused; first token after", end=" ")
    print(f"{r['first_token_ms']:.0f} ms, by text replay {r['replay_first_token_ms']:.0f} ms; {r['reasons']} --\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="local directory, pulled name or Hub id")
    parser.add_argument("--kill", choices=INSTRUCTIONS, help="whom to kill -9")
    parser.add_argument("--role", choices=INSTRUCTIONS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        work(options.role, options.model) if options.role else main(options.model, options.kill)
    except (QKVShareError, KeyboardInterrupt) as error:
        raise SystemExit(f"error: {error}" if str(error) else "stopped") from None
