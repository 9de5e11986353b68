"""Draw results in a terminal, as figures and as web pages."""
