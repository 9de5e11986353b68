"""Helpers without domain knowledge: validation, atomic files, text tables, random numbers, plotting, lazy imports."""
