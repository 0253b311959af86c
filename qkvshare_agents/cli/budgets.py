"""The part of the command line that is about many agents and one budget: `qkvshare top` and `qkvshare eval budget`."""

import json
from typing import Annotated

import typer


def add_to(app: typer.Typer, eval_app: typer.Typer) -> None:
    """Make them commands of the command line."""
    app.command("top")(top)
    eval_app.command("budget")(eval_budget)


def top(
    watch: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Show again every so often.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Agents of this user's running hosts: tokens, bytes, bits per layer, and the budget."""
    import time

    from qkvshare_agents.host import status

    while True:
        hosts = status.running()
        if watch and not as_json:
            typer.echo("\033[2J\033[H", nl=False)
        if as_json:
            typer.echo(json.dumps(hosts, indent=None if watch else 2))
        else:
            for host in hosts:
                typer.echo("\n".join(status.lines(host)))
            if not hosts:
                typer.echo("no host is running, or none has answered yet")
        if not watch:
            return
        time.sleep(watch)


def eval_budget(
    model: Annotated[str, typer.Option(help="Pulled name, directory or Hub id.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=256, help="Stored tokens per agent; one has twice as many.")] = 1024,
    positions: Annotated[int, typer.Option(min=16, help="Tokens read behind them.")] = 384,
    problems: Annotated[int, typer.Option(min=0, help="Of HumanEval, answered behind solved ones.")] = 6,
    average: Annotated[list[float] | None, typer.Option(help="Average widths; several may be given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    plot_file: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Also draw KL over bytes (png, svg, pdf).")
    ] = None,
) -> None:
    """How well agents that share a budget keep what they know: fixed widths, per layer, and jointly, at equal bytes."""
    from qkvshare_agents.eval import budget, budget_table, humaneval, plot

    if plot_file:
        plot.require()
    if problems and not humaneval.is_installed():
        typer.echo("HumanEval is left out; pip install 'qkvshare-agents[eval]' brings its problems", err=True)
        problems = 0
    averages = average or budget.AVERAGES
    result = budget.run(model=model, tokens=tokens, positions=positions, problems=problems, averages=averages)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        budget_table.show(result)
    if plot_file:
        budget_table.draw(result, plot_file)
