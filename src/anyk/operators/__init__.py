"""Step 2: relaxations of sorting, one file each."""

from anyk.operators.base import OPERATORS, Inclusion, Mask, Operator, Ranks, Sort, Threshold, by_name, register
from anyk.operators.ksubset import KSubset
from anyk.operators.lapsum import LapSum
from anyk.operators.network import SortingNetwork
from anyk.operators.permutahedron import Permutahedron
from anyk.operators.rowsoftmax import NeuralSort, SoftSort
from anyk.operators.sinkhorn import SinkhornSort

__all__ = ["OPERATORS", "Inclusion", "Mask", "Operator", "Ranks", "Sort", "Threshold", "by_name", "register"]
__all__ += ["KSubset", "LapSum", "NeuralSort", "Permutahedron", "SinkhornSort", "SoftSort", "SortingNetwork"]
