"""One training: its recipe, model, loss, loop, folder and processes."""
