"""Between callers and engines: requests, the queue, routing, and what each engine may do."""
