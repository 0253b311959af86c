"""Messages become token ids, and token ids become answers."""
