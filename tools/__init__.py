"""Maintenance scripts that need a checkout: README tables, model cards, cost-model constants, a study, and fuzzing.

They are not part of the package.
"""
