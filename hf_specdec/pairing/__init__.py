"""Draft pairings: a target, the draft that suits it, and what was measured of the two, as one small folder or repo."""
