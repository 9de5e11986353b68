"""Comparisons with baselines. Both sides run alternately in one process, and results are reported as ratios."""
