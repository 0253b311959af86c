"""A second process for the tests: a tiny model of its own, and one half of a handoff over shm."""

import sys
import time
from pathlib import Path

from support import tiny_engine, tiny_tokenizer

from qkvshare_agents.eval import families
from qkvshare_agents.host.courier import Courier
from qkvshare_agents.host.host import Host
from qkvshare_agents.model.engine import Engine
from qkvshare_agents.prompt.layout import Message
from qkvshare_agents.prompt.sampling import Sampling
from qkvshare_agents.settings import HostSettings
from qkvshare_agents.transport.shm import ShmTransport
from qkvshare_agents.turns.request import Turn

SECRET = "a secret that both sides were given"
TASK = Message(
    "user", "Say something long enough to fill a page or two of the cache, please, and then some more.", "user"
)


def open_host(family: str = "", **settings: object) -> Host:
    engine = Engine.of(families.tiny_model(family), tiny_tokenizer()) if family else tiny_engine()
    host = Host(HostSettings("tiny", **{"precision": "native", "secret": SECRET, **settings}), engine)
    for name in "ab":
        host.roster.learn("", name, f"You are {name}, and you say what {name} says.")
    return host


def turn(host: Host, name: str, *messages: Message, **fields: object) -> Turn:
    return Turn(host.roster.members("")[name], "", messages, Sampling(max_tokens=60), **fields)


def main(folder: str, task: str, family: str = "") -> None:
    """`send`: answer as `a` and print the key and the answer. `hang`: stop while the package is being written."""
    host = open_host(family)
    transport = ShmTransport(folder)
    answer = Message("assistant", host.submit(turn(host, "a", TASK)).result().text, "a")
    if task == "hang":
        put = transport.put

        def hanging(*args: object, **options: object) -> None:
            print("hanging", flush=True)
            time.sleep(60)
            put(*args, **options)

        transport.put = hanging
    sent = Courier(host, transport, deadline_ms=20_000).send(turn(host, "b", TASK, answer))
    Path(folder, "answer.txt").write_text(answer.text)
    print(sent.key, flush=True)
    time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
