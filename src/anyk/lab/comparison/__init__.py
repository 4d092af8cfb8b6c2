"""Which loss is best on some data: tuning, search, outcome, verdict, snippet, page; `anyk.lab.compare` is the function."""
