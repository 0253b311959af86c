"""The rows of `budget.run` as a table, and as a picture: KL over stored bytes, a line for each policy."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from qkvshare_agents.eval import plot

_COLUMNS = (
    "policy", "bits", "MB", "KL", "top1 %", "ppl", "facts %", "answers", "same", "peak MB", "less", "tok/s", "speed",
)  # fmt: skip
_LINES = {
    "uniform": ("o", "equal widths"),
    "key_value_split": ("s", "wider keys"),
    "per_layer": ("^", "per layer"),
    "joint": ("*", "joint"),
}


def show(result: dict[str, Any], console: Console | None = None) -> None:
    """Print a result, a table for each team of agents.

    bits: average width of the codes. MB: of all agents, everything counted. KL of the next token in nats and top-1
    against native KV, means over the agents. ppl: perplexity of texts that go on. facts: those found. answers: to
    HumanEval's problems that are native's to their end; same: tokens up to the first other one, in the mean. peak MB:
    of KV while agents decode in turn, histories packed; less: than all of them native. speed: tok/s over native's.
    """
    console = console or Console(width=100)
    h = result["header"]
    for team in dict.fromkeys(row["team"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["team"] == team]
        native = rows[0]
        title = f"{h['model']} ({h['dtype']}): {native['agents']} agents ({team}) of {h['tokens']} tokens and more"
        table = Table(title=title, box=SIMPLE_HEAD, padding=0, pad_edge=False, collapse_padding=True)
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
        for row in rows:
            if "skipped" not in row:
                table.add_row(*_cells(row, native["peak_kv_bytes"]))
        console.print(table)


def _cells(row: dict[str, Any], native_peak: int) -> list[str]:
    needles, answers, same = (row[name] for name in ("needle_hits", "equal_answers", "equal_prefix_tokens"))
    return [
        row["policy"],
        f"{row['average_bits']:g}",
        f"{row['stored_bytes'] / 1e6:.2f}",
        f"{row['mean_kl']:.2e}",
        f"{100 * row['top1']:.2f}",
        f"{row['perplexity']:.2f}",
        "-" if needles is None else f"{100 * needles:.0f}",
        "-" if answers is None else f"{answers}",
        "-" if same is None else f"{same:.1f}",
        f"{row['peak_kv_bytes'] / 1e6:.1f}",
        f"{100 - 100 * row['peak_kv_bytes'] / native_peak:.0f} %",
        f"{row['tokens_per_s']:.1f}",
        f"{100 * row['tokens_per_s'] / row['native_tokens_per_s']:.0f} %",
    ]


def draw(result: dict[str, Any], path: str) -> None:
    """Write the picture; the format follows from the name. Raises InvalidSetting, MissingDependency."""
    plot.require()
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    header, teams = result["header"], list(dict.fromkeys(row["team"] for row in result["rows"]))
    figure = Figure(figsize=(5 * len(teams), 4.5), layout="constrained")
    panels = figure.subplots(1, len(teams), squeeze=False, sharey=True)[0]
    for axes, team in zip(panels, teams, strict=True):
        rows = [r for r in result["rows"] if r["team"] == team and "skipped" not in r and r["policy"] != "native"]
        for average, at in {r["average_bits"]: r["stored_bytes"] / 1e6 for r in rows}.items():
            axes.axvline(at, color="0.9", zorder=0)
            axes.annotate(f"{average:g} bits", (at, 1), xycoords=("data", "axes fraction"), xytext=(0, 3),
                          textcoords="offset points", ha="center", color="0.4", fontsize=8)  # fmt: skip
        for policy, (mark, name) in _LINES.items():
            points = [(r["stored_bytes"] / 1e6, r["mean_kl"]) for r in rows if r["policy"] == policy]
            if points:
                size, style = (6, "-") if policy != "joint" else (9, "--")  # it often lies on others
                axes.plot(*zip(*points, strict=True), marker=mark, ms=size, ls=style, lw=1, label=name)
        axes.set(xlabel="stored MB, everything counted", yscale="log")
        agents = next(r["agents"] for r in rows)
        axes.set_title(f"{agents} agents, {team}", pad=18, fontsize=10)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    panels[0].set_ylabel("mean KL of the next token (nats)")
    panels[-1].legend()
    figure.suptitle(
        f"{header['model']}, {header['tokens']} tokens each, one twice as many, {header['date']}", fontsize=11
    )
    plot.save(figure, path)
