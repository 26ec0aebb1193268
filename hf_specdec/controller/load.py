"""How busy the machine is, from times of things that were timed before."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from hf_specdec.controller.curves import Samples

# Rounds that must all have been slower than usual, or all faster: by chance that is one in 64.
WINDOW = 7
# Samples that make a time the usual one.
FEWEST_KNOWN = 3


class Load:
    """The factor by which everything takes longer at the moment than when what is known was measured.

    Other programs come and go, and lengths are compared that were not timed in the same minute. Dividing by this factor
    makes their times comparable.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._ratios: deque[float] = deque(maxlen=WINDOW)

    def observe(self, seconds: float, known: Samples | None) -> None:
        """Take in how long something took that took as long as `known` before, divided by the factor then."""
        if known is None or not known.median or len(known.values) < FEWEST_KNOWN:
            return
        if not 0.0 < seconds < math.inf:
            return  # clocks can stand still
        self._ratios.append(seconds / known.median)
        is_shifted = len(self._ratios) == WINDOW and (min(self._ratios) > 1.0 or max(self._ratios) < 1.0)
        self.factor = median(self._ratios) if is_shifted else 1.0
