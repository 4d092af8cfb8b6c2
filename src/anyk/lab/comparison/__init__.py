"""Which loss is best on some data: search, outcome, verdict, page."""
