"""Computes whether a model fits a host and how to share out its chips: `enginepool plan`.

By arithmetic on a configuration. Nothing is built, loaded or compiled.
"""
