"""One training: its config, model, loss, loop, folder and processes."""
