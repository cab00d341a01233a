"""Looks at a host for people: what it has, what a step costs, what fits."""
