"""The ways to compute attention, one file each. `attend` chooses among them; a test holds them to the same numbers."""
