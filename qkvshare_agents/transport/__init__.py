"""Move packages: `local`, `shm`, `redis`, `mooncake`, all behind one small interface."""
