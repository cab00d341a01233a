"""One engine: its thread, its door, upstream's scheduler inside, and what it runs."""
