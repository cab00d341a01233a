"""Reports about a host: what it has, what a step costs, what fits."""
