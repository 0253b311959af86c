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


def test_what_can_not_be_measured_is_said() -> None:
    with pytest.raises(InvalidSetting, match="tokens must be more than 128"):
        transport.run(engine=tiny_engine(), tokens=64)
