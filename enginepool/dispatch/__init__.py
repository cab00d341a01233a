"""Hands requests to engines: requests, the queue, routing, and the condition of each engine."""
