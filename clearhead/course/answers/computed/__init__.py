"""Values, tables and figures of the model answers, one module or package per course document.

The name of a placeholder is the name of a function without parameters.
"""
