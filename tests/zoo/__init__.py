"""Tiny random models of every architecture that the host library knows."""
