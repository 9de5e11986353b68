"""`python -m clearhead.cli` is the `clearhead` command."""

from clearhead.cli import main

main()
