"""What lists of a promised coverage need, kept in a model's file: split conformal prediction without the data.

See :class:`anyk.PredictionSets` for what is promised, and docs/lab.md for when it does not hold.
"""

import itertools
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from anyk import prediction_sets
from anyk.lab.errors import LabError
from anyk.lab.run.config import accept, describe

#: thresholds are kept for the coverages 0.001, 0.002, …
_STEPS = 1000
#: of a log-probability, rounded down: above what another batch size or order of summation changes
_DIGITS = 4


@dataclass(frozen=True)
class Calibration:
    """The log-probabilities that a class needs to be shown, by coverage."""

    examples: int
    """validation examples that it follows from; where they have groups, the number of these"""
    chose: tuple[str, ...]
    """what the same examples had chosen before, such as "the epoch": the promise is weaker then"""
    thresholds: tuple[float, ...]
    """for 1, 2, … thousandths, as far as something can be promised; 0 where the first guess is enough"""

    @classmethod
    def of(cls, conformity: Tensor, chose: tuple[str, ...], groups: Tensor | None = None) -> "Calibration":
        """From what :func:`anyk.prediction_sets.conformity` gives of held-out examples; NaN counts as no guess at all.

        With groups, what is promised is of examples of new groups: of each group one example counts, drawn the same each time.
        """
        values = torch.where(conformity.isnan(), -torch.inf, conformity.double()).clamp(max=0.0)
        if groups is not None:
            order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
            _, whose = torch.unique(groups[order], return_inverse=True)
            places = torch.full((int(whose.max()) + 1,), len(order))
            values = values[order[places.scatter_reduce(0, whose, torch.arange(len(order)), "amin")]]
        ordered = values.sort(descending=True).values
        examples, thresholds = len(ordered), []
        for step in range(1, _STEPS):
            place = -(-(examples + 1) * step // _STEPS)  # rounded up
            if place > examples or not math.isfinite(value := float(ordered[place - 1])):
                break
            thresholds.append(math.floor(value * 10**_DIGITS) / 10**_DIGITS)
        return cls(examples, chose, tuple(thresholds))

    def threshold(self, coverage: float) -> float:
        """The threshold for a coverage, of which a part of a thousandth counts as a whole one; a LabError says why not."""
        try:
            share = prediction_sets.checked_coverage(coverage)
        except (TypeError, ValueError) as error:
            raise LabError(f"{error}.") from None
        step = math.ceil(share * _STEPS)
        if step <= len(self.thresholds):
            return self.thresholds[step - 1]
        needed = math.ceil(Fraction(step, _STEPS - step)) if step < _STEPS else None
        reason = f"it was calibrated with {self.examples:,} validation examples"
        if needed is None:
            reason = "nothing is kept beyond 0.999"
        elif needed > self.examples:
            reason += f", and needs {needed:,}"
        else:
            reason += ", too many of which have a target that it never guesses"
        most = f"ask for at most {len(self.thresholds) / _STEPS:g}" if self.thresholds else "train it with more of them"
        raise LabError(f"coverage {float(share):g} cannot be promised by this model: {reason}; {most}.")

    @classmethod
    def from_json(cls, fields: Any) -> "Calibration":
        """What a model's file has, or a ValueError that says what is wrong with it."""
        types, values = typing.get_type_hints(cls), {}
        if not isinstance(fields, Mapping) or fields.keys() != types.keys():
            raise ValueError(f"calibration should have {', '.join(types)}")
        for name, kind in types.items():
            accepted, values[name] = accept(fields[name], kind)
            if not accepted:
                raise ValueError(f"{name} of the calibration should be {describe(kind)}")
        found = cls(**values)
        falling = all(-math.inf < low <= high for high, low in itertools.pairwise((0.0, *found.thresholds)))
        if not (0 <= found.examples < 2**62 and len(found.thresholds) < _STEPS and falling):
            raise ValueError("thresholds of the calibration should be numbers that fall from 0, fewer than 1000")
        return found
