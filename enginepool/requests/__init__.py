"""A request from a caller's arguments to its result, and the queue in between."""
