"""Errors and standard output of commands."""
