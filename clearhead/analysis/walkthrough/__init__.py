"""An annotated walkthrough of one forward pass, step by step."""
