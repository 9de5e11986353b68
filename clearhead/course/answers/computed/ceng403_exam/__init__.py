"""Values, tables and figures of the answers to the CENG 403 exam, one module per theme."""
