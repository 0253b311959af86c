"""A loaded model: where it comes from, what it is, what it does after injected KV."""
