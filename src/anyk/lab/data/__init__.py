"""Data sets by name or path."""

from anyk.lab.data.sets import Dataset, Parts, Split, split

__all__ = ["Dataset", "Parts", "Split", "split"]
