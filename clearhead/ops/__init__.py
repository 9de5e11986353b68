"""Fused operations without modules: linear layers, cross entropy, top-k, activations."""
