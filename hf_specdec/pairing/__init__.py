"""What a target and a draft have to do with each other: their tokens, and draft pairings.

A draft pairing is a target, the draft that suits it, and what was measured of the two, as one small folder or repo.
"""
