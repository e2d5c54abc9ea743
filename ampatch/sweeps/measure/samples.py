"""How many samples a step takes."""

from __future__ import annotations

import statistics
from array import array
from collections import Counter


class Samples:
    """Counts the samples that models are given, or takes what the script reports.

    Of several models in a step the one that was given the fewest counts: a discriminator sees real and
    made-up samples.
    """

    def __init__(self) -> None:
        self._present: Counter[int] = Counter()
        self._counted = array("q")
        self._reported = array("d")

    def add(self, model: int, samples: int) -> None:
        """Takes the samples of a forward."""
        self._present[model] += samples

    def end_step(self) -> None:
        """Ends a step; one in which nobody looked has none."""
        counts = [count for count in self._present.values() if count]
        if counts:
            self._counted.append(min(counts))
        self._present.clear()

    def report(self, samples: float) -> None:
        """Takes what a script says a step has, which counts from now on."""
        self._reported.append(samples)

    def median(self) -> float | None:
        """Returns the samples of a step; None if models were given no tensors, or never called."""
        values = self._reported or self._counted
        return float(statistics.median(values)) if values else None
