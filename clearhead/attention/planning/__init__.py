"""How a mask becomes lists of columns for blocks of rows: the part of planning that knows nothing of devices
or kernels."""
