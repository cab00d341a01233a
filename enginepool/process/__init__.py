"""The process that a pool lives in: left as it was found, tuned if asked, forks noticed."""
