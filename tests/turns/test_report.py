"""Reports add up, can be logged as they are, and hold no text of the conversation."""

import io
import json

from rich.console import Console

from qkvshare_agents.turns.plan import Mode
from qkvshare_agents.turns.report import HandoffReport, table


def report(**changes: object) -> HandoffReport:
    values: dict[str, object] = {
        "agent": "tester", "source": "coder", "mode": Mode.PARTIAL, "reasons": ("the transcript was edited",),
        "prompt_tokens": 500, "reused_tokens": 400, "generated_tokens": 30, "payload_bytes": 2_500_000,
        "fp16_bytes": 5_000_000, "import_ms": 1.5, "transfer_ms": 0.0, "first_token_ms": 20.0, "quantize_ms": 2.25,
        "total_ms": 300.0,
    }  # fmt: skip
    return HandoffReport(**{**values, **changes})  # type: ignore[arg-type]


def shown(*reports: HandoffReport) -> str:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(reports))
    return console.export_text()


def test_tokens_add_up_and_the_ratio_is_of_the_same_tokens() -> None:
    assert (report().prefilled_tokens, report().payload_ratio) == (100, 0.5)
    assert report(payload_bytes=0, fp16_bytes=0).payload_ratio is None


def test_a_report_is_plain_json() -> None:
    told = json.loads(json.dumps(report().to_dict()))
    assert told["mode"] == "PARTIAL" and told["reasons"] == ["the transcript was edited"]
    assert (told["prefilled_tokens"], told["payload_ratio"], told["replay_first_token_ms"]) == (100, 0.5, None)
    assert json.loads(json.dumps(report(fp16_bytes=0).to_dict()))["payload_ratio"] is None


def test_the_table_shows_every_turn_and_its_reasons_in_80_columns() -> None:
    text = shown(
        report(source="", mode=Mode.TEXT, reused_tokens=0, payload_bytes=0, fp16_bytes=0, reasons=("first turn",)),
        report(replay_first_token_ms=90.0),
    )
    assert all(len(line) <= 80 for line in text.splitlines())
    for part in ("coder", "tester", "PARTIAL", "TEXT", "400", "100", "0.50", "4.5", "first turn", "edited"):
        assert part in text, part


def test_the_table_shows_hops_also_where_kv_was_moved() -> None:
    long = {"reused_tokens": 15_000, "payload_bytes": 250_000_000, "first_token_ms": 2345.0}
    text = shown(*[report(hops=17, transfer_ms=123.4, prompt_tokens=16_000, replay_first_token_ms=9e4, **long)] * 12)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert " 17" in text and "15000" in text and "123.4" in text


def test_no_number_is_cut_whatever_the_names() -> None:
    names = {"agent": "a_planner_of_lamps", "source": "an_editor_of_texts", "mode": Mode.PARTIAL}
    text = shown(report(replay_first_token_ms=12345.0, first_token_ms=1234.0, transfer_ms=123.4, **names))
    assert all(len(line) <= 80 for line in text.splitlines())
    for number in ("PARTIAL", "400", "100", "2.5", "0.50", "2.2", "123.4", "1.5", "1234", "12345", "10.0"):
        assert f" {number} " in f"{text} ".replace("\n", " "), number


def test_the_table_of_nothing_can_be_shown() -> None:
    assert "Handoffs" in shown()
