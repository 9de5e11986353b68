"""Interpretability: logit lens, attribution, residual stream, activation patching, induction scores."""
