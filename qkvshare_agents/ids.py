"""Token ids, what two runs of them have in common, and spans of positions."""

Ids = tuple[int, ...]
