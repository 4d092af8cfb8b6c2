"""Which loss is best on some data. In the order of the work: config, tuning, search, changed_predictions, outcome, verdict,
snippet, results (JSON), report_page (HTML), compare (the function)."""
