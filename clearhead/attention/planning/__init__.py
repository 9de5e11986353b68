"""How a mask becomes lists of columns for blocks of rows: what of planning knows nothing of devices or kernels."""
