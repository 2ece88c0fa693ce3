"""Before a run: what it costs, whether it fits, and which layout is fastest."""
