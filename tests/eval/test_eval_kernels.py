"""The benchmark of the kernels counts what it says, at sizes that take no time."""

import os

import pytest

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import kernels


def test_rows_say_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKVSHARE_KERNELS", "torch")
    sizes = kernels.Sizes(layers=2, heads=1, query_heads=3, head_size=64, tokens=128)
    result = kernels.run(implementations=["torch"], sizes=sizes, rounds=1)
    rows = result["rows"]
    assert [(r["op"], r["bits"]) for r in rows[:3]] == [("quantize", 8), ("dequantize", 8), ("attention", 8)]
    assert len(rows) == 12 and {r["impl"] for r in rows} == {"torch"}
    native, packed = 2 * 2 * 128 * 64 * 4, 2 * 2 * 128 * 64 * 8.375 / 8
    for row, moved in zip(rows[:3], (native + packed, native + packed, packed), strict=True):
        assert row["gb_per_s"] * row["ms"] * 1e6 == pytest.approx(moved, rel=0.02)
        assert (row["sdpa_ms"] is None) == (row["op"] != "attention") and row["copy_gb_per_s"] > 0
    assert os.environ["QKVSHARE_KERNELS"] == "torch", "the choice is given back"


def test_the_table_fits_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = {"bits": 8, "impl": "triton", "gb_per_s": 1234.5, "copy_gb_per_s": 0.123, "fresh_copy_gb_per_s": 98765.4}
    rows = [row | {"op": op, "ms": 43210.9, "sdpa_ms": 12.345} for op in ("quantize", "dequantize", "attention")]
    kernels.show({"rows": rows, "sizes": vars(kernels.Sizes())})
    shown = capsys.readouterr().out
    for text in ("bits", "SDPA ms", "triton", "dequantize", "43211", "1234", "0.12", "98765", "12.3"):
        assert text in shown
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80


def test_what_cant_be_measured_is_an_error() -> None:
    with pytest.raises(InvalidSetting, match="multiple of 64"):
        kernels.run(sizes=kernels.Sizes(tokens=100))
    with pytest.raises(InvalidSetting, match="choose from"):
        kernels.run(implementations=["cuda"])
