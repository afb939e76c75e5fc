"""Entry point of `python -m baton`, the same as the command `baton`."""

from baton.cli.main import main

main()
