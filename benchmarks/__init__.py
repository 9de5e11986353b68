"""Side-by-side measurements against peers: both in one run, in turn, and only their ratio is quoted."""
