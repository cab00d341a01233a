"""Whether a model fits a host, and how its chips are best shared out: `enginepool plan`.

By arithmetic on a configuration: nothing is built, loaded or compiled.
"""
