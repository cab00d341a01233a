"""One engine: its thread, its channel, upstream's scheduler, and the programs that it runs."""
