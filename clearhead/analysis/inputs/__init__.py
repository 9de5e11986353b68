"""How to call a module: what inputs it takes, found automatically or given as a specification."""
