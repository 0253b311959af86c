"""The benchmark of transports, on a tiny model: it runs, its numbers hang together, and handoffs leave nothing."""

import json

import pytest
from servers import valkey  # noqa: F401
from support import tiny_engine

from qkvshare_agents.errors import InvalidSetting
from qkvshare_agents.eval import transport


def test_every_transport_is_measured(valkey: str, capsys) -> None:  # noqa: F811
    result = transport.run(engine=tiny_engine(), tokens=512, suffix=16, rounds=1, redis_url=valkey, handoffs=200)
    assert json.loads(json.dumps(result)) == result
    assert list(result["transports"]) == ["local", "shm", "shm mapped", "redis"]
    sizes = {t["payload_bytes"] for t in result["transports"].values()}
    assert len(sizes) == 1 and 10_000 < sizes.pop() < 10_000_000
    for times in result["transports"].values():
        parts = sum(times[name] for name in ("write_ms", "put_ms", "get_ms", "read_ms"))
        assert 0 < parts < times["handoff_ms"]
        assert times["put_and_get_ratio"] == (times["put_ms"] + times["get_ms"]) / result["hot_prefix_ms"]
        assert times["moving_ratio"] == parts / result["hot_prefix_ms"]
        assert times["crossover_tokens"] is None or times["crossover_tokens"] >= 1
        assert times["gb_per_s"] > 0
    assert result["break_even_mb_per_s"] > 0 and result["check_ms"] > 0
    many = result["many"]
    assert (many["handoffs"], many["files"], many["descriptors"]) == (200, 0, 0)
    assert many["resident_bytes"] < 20_000_000
    transport.show(result)
    assert "200 handoffs over shm" in capsys.readouterr().out


def test_the_table_is_whole_in_80_columns(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ms = {"write_ms": 123.4, "put_ms": 234.5, "get_ms": 345.6, "read_ms": 456.7, "raw_put_ms": 1567.8}
    times = {**ms, "raw_get_ms": 1678.9, "gb_per_s": 12.34, "put_and_get_ratio": 2.345, "moving_ratio": 9.876}
    times |= {"crossover_tokens": 12345, "payload_bytes": 10**8}
    result = {"tokens": 4096, "model": "tiny", "preset": "safe", "transports": {"shm mapped": times}}
    result |= {"digest": "sha256", "break_even_mb_per_s": 1.0, "hot_prefix_ms": 1.0, "replay_ms": 1.0, "check_ms": 1.0}
    transport.show(result)
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines()) and "…" not in out
    for part in ("shm mapped", "123.4", "456.7", "234.5%", "987.6%", "1567.8", "1678.9", "12.34", "12345", "put+get"):
        assert part in out, part


def test_what_can_not_be_measured_is_said() -> None:
    with pytest.raises(InvalidSetting, match="tokens must be more than 128"):
        transport.run(engine=tiny_engine(), tokens=64)
