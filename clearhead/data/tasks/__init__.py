"""Tasks: a training and a validation split, and how a batch of each is made."""
