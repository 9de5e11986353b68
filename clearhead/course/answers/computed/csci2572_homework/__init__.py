"""Values, tables and figures of the answers to the homework of CSCI-GA 2572, one module per theme."""
