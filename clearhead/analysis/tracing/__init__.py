"""Record the attention of a forward pass, recompute weights from it, and intervene in it."""
