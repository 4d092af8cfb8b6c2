"""The second study: where a top-k loss pays. The plan, the runs, and the page."""
