"""`python -m baton` is the command `baton`."""

from baton.cli.main import main

main()
