"""Keys and values: quantized pages, and the caches that attention reads."""
