"""One turn: what is asked, what it continues from, the answer, the report."""
