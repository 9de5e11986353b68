from clearhead import errors, masks


try:
    masks.parse("causl()")
except errors.ParseError as error:  # a MaskError, a ClearheadError and a ValueError
    print(error.column)  # where reading stopped

caught = (errors.ClearheadError, errors.ShapeError, errors.DtypeError, errors.MaskError, errors.MaskTypeError)

more = (errors.ConfigError, errors.ImplementationError, errors.StorageError, errors.DataError, errors.MissingDependencyError, errors.KeywordError)

with errors.optional_dependency("drawing needs matplotlib: pip install 'clearhead[plot]'"):
    pass  # if it is missing, a MissingDependencyError says that sentence
