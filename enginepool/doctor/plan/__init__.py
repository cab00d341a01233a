"""Computes whether a model fits a host and how to divide its chips: `enginepool plan`.

It computes from a configuration alone. Nothing is loaded. Only `--compile` compiles programs.
"""
