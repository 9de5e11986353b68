"""Inputs of a module: their kinds and shapes, detected automatically or specified by the caller."""
