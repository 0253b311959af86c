"""What is kept of earlier turns, found by the longest equal prefix."""
