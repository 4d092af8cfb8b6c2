"""Step 2: relaxations of sorting, one file each."""

from anyk.operators.base import Operator
from anyk.operators.ksubset import KSubset
from anyk.operators.lapsum import LapSum
from anyk.operators.named import by_name, names
from anyk.operators.neuralsort import NeuralSort
from anyk.operators.permutahedron import Permutahedron
from anyk.operators.sinkhorn import SinkhornSort
from anyk.operators.softsort import SoftSort
from anyk.operators.sorting_network import SortingNetwork

__all__ = [
    "KSubset",
    "LapSum",
    "NeuralSort",
    "Operator",
    "Permutahedron",
    "SinkhornSort",
    "SoftSort",
    "SortingNetwork",
    "by_name",
    "names",
]
