"""The rows of `fidelity.run` as a table of at most 100 columns."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

_CELLS = {
    "stored_bytes": ("MB", ""),
    "packed_bits_per_value": ("bits", ".2f"),
    "mean_kl": ("KL", ".1e"),
    "p99_kl": ("p99 KL", ".1e"),
    "top1": ("top1 %", "2%"),
    "ppl_delta": ("ppl %", "+.2f"),
    "repeat_mean_kl": ("rep. KL", ".1e"),
    "repeat_top1": ("rep. %", "1%"),
    "needle_hits": ("needle", "0%"),
    "code_equal": ("code", "0%"),
    "seal_ms": ("seal", ".0f"),
    "open_ms": ("open", ".0f"),
}


def show(result: dict[str, Any], console: Console | None = None) -> None:
    """Print a result; rows that were skipped go below the table, with the reason.

    MB: of everything; bits: per value of the packed part, scales and minima included. KL is that of the next token in
    nats, top-1 the share of positions with the same likeliest token, both against native KV; `rep.` is measured
    while repeating the cached text, the others while continuing it. needle: percent of the hidden facts that were
    found; code: percent of HumanEval answers that are native's. seal, open: ms.
    """
    h = result["header"]
    positions = f"{h['positions']} + {h['repeat_positions']} positions"
    title = f"{h['model']} ({h['dtype']}): {h['tokens']} cached tokens, {positions}"
    table = Table(title=title, box=SIMPLE_HEAD, padding=0, pad_edge=False, collapse_padding=True)
    table.add_column("scheme", no_wrap=True)
    for name, _ in _CELLS.values():
        table.add_column(name, justify="right", no_wrap=True)
    console = console or Console(width=100)
    for row in result["rows"]:
        if "skipped" not in row:
            table.add_row(row["scheme"], *(_cell(row[key], form) for key, (_, form) in _CELLS.items()))
    console.print(table)
    for row in result["rows"]:
        if "skipped" in row:
            console.print(f"{row['scheme']}: skipped, {row['skipped']}", markup=False)


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    if form.endswith("%"):
        return f"{100 * value:.{form[:-1]}f}"
    return f"{value:{form}}" if form else f"{value / 1e6:.2f}"
