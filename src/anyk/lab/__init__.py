"""The lab: find out on your own data whether top-k training helps. `anyk --help` lists its commands."""
