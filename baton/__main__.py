"""`python -m baton` is the command `baton`."""

from baton.cli import main

main()
