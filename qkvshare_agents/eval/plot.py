"""Fidelity over bytes as a picture, with the Pareto frontier drawn."""

from collections.abc import Sequence
from typing import Any

from qkvshare_agents.errors import InvalidSetting, MissingDependency

_COLOURS = {"ours": "tab:blue", "other": "tab:orange"}
# Where a name may stand, in points from its point, and on which side of it
_PLACES = [((x, y), align) for y in (2, -8, 11, -17, 20, -26) for x, align in ((5, "left"), (-5, "right"))]


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
    """Write `picture(result)`, see `save`. Raises MissingDependency without matplotlib."""
    save(picture(result), path)


def save(figure: Any, path: str) -> None:
    """Write a matplotlib figure; the format follows from the name. Raises InvalidSetting if it names none."""
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise InvalidSetting(f"no plot can be written to {path!r}: {error}") from error


def picture(result: dict[str, Any]) -> Any:
    """A matplotlib figure: mean KL over stored bytes, both logarithmic, of a result of `fidelity.run`."""
    require()
    from matplotlib.figure import Figure

    rows = [r for r in result["rows"] if r["group"] != "control" and r["mean_kl"] and r["mean_kl"] > 0]
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for group, colour in _COLOURS.items():
        points = [r for r in rows if r["group"] == group]
        axes.scatter([_mb(r) for r in points], [r["mean_kl"] for r in points], c=colour, s=18, label=group)
    best = frontier(rows)
    axes.plot([_mb(r) for r in best], [r["mean_kl"] for r in best], "k--", lw=0.8, label="frontier")
    header = result["header"]
    axes.set(xlabel="stored MB, everything counted", ylabel="mean KL of the next token (nats)")
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_title(f"{header['model']}, {header['tokens']} tokens, {header['positions']} positions, {header['date']}")
    axes.legend(loc="lower left")
    _label(figure, axes, rows)
    return figure


def _label(figure: Any, axes: Any, rows: list[dict[str, Any]]) -> None:
    """Each point's name beside it, at the first of a few places where it covers neither a name nor a point."""
    figure.draw_without_rendering()
    points = axes.transData.transform([(_mb(row), row["mean_kl"]) for row in rows])
    taken: list[Any] = []
    for row in sorted(rows, key=lambda r: r["mean_kl"]):
        beside = {"xy": (_mb(row), row["mean_kl"]), "textcoords": "offset points"}
        text = axes.annotate(row["scheme"], xytext=(0, 0), fontsize=7, **beside)
        for offset, align in _PLACES:
            text.set(position=offset, ha=align)
            box = text.get_window_extent()
            inside = axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max)
            if inside and not box.count_contains(points) and not any(box.padded(4).overlaps(o) for o in taken):
                break
        taken.append(box)
        line = {"arrowstyle": "-", "lw": 0.4, "color": "gray", "shrinkA": 0, "shrinkB": 2}
        axes.annotate("", xytext=offset, arrowprops=line, **beside)


def _mb(row: dict[str, Any]) -> float:
    return float(row["stored_bytes"]) / 1e6
