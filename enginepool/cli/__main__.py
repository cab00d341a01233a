"""Runs the command as `python -m enginepool.cli`, for when its script is not installed."""

from enginepool.cli.main import main

main()
