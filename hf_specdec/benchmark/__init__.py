"""Measure decoding fairly: every alternative in one process, interleaved, medians with spread."""
