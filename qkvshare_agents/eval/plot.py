"""Fidelity over bytes as a picture, with the Pareto frontier drawn."""

from collections.abc import Sequence
from typing import Any

from qkvshare_agents.errors import InvalidSetting, MissingDependency

_COLOURS = {"ours": "tab:blue", "other": "tab:orange"}


def require() -> None:
    """Raise MissingDependency now rather than after minutes of measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependency("a plot needs matplotlib; run: pip install 'qkvshare-agents[plot]'") from error


def frontier(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that no other beats in both stored_bytes and mean_kl, smallest first."""
    best: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda r: (r["stored_bytes"], r["mean_kl"])):
        if not best or row["mean_kl"] < best[-1]["mean_kl"]:
            best.append(row)
    return best


def draw(result: dict[str, Any], path: str) -> None:
    """Write mean KL (log) over stored bytes of a result of `fidelity.run`; the format follows from the name.

    Raises InvalidSetting for a name that matplotlib knows no format for, MissingDependency without matplotlib.
    """
    require()
    from matplotlib.figure import Figure

    rows = [r for r in result["rows"] if r["group"] != "control" and r["mean_kl"] and r["mean_kl"] > 0]
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for group, colour in _COLOURS.items():
        points = [r for r in rows if r["group"] == group]
        axes.scatter([r["stored_bytes"] / 1e6 for r in points], [r["mean_kl"] for r in points], c=colour, label=group)
    for row in rows:
        at = (row["stored_bytes"] / 1e6, row["mean_kl"])
        axes.annotate(row["scheme"], at, xytext=(4, 3), textcoords="offset points", fontsize=7)
    best = frontier(rows)
    axes.plot([r["stored_bytes"] / 1e6 for r in best], [r["mean_kl"] for r in best], "k--", lw=0.8, label="frontier")
    axes.set(xlabel="stored MB, everything counted", ylabel="mean KL of the next token (nats)", yscale="log")
    header = result["header"]
    axes.set_title(f"{header['model']}, {header['tokens']} tokens, {header['positions']} positions, {header['date']}")
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise InvalidSetting(f"no plot can be written to {path!r}: {error}") from error
