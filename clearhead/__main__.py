"""`python -m clearhead` is the `clearhead` command."""

from clearhead.cli import main

main()
