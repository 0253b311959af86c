"""Fast implementations of the codec (`backend` chooses) and their specification in plain torch (`reference`)."""
