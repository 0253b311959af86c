"""KV that leaves for other processes and comes from them, and from other models."""
