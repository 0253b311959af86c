"""Prompts that do not fit into the context, or whose KV is put together from pieces."""
