"""Fast implementations of the codec and their specification in plain torch (`reference`)."""
