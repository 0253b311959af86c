"""Pages of a conversation as bytes that another process believes only when they fit."""
