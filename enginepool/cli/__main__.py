"""`python -m enginepool.cli`: the command without its script."""

from enginepool.cli.main import main

main()
