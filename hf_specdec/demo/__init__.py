"""A small trained target and draft that ship with the package, and prompts for them: everything runs offline."""

from __future__ import annotations

from hf_specdec.demo.pair import DEMO_FOLDER, DemoPair, load_demo_pair
from hf_specdec.demo.prompts import DEMO_PROMPTS
from hf_specdec.demo.widening import BallastSize, ballast_size, widen

__all__ = ["DEMO_FOLDER", "DEMO_PROMPTS", "BallastSize", "DemoPair", "ballast_size", "load_demo_pair", "widen"]
