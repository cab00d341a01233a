"""What a host has and what a step costs, for people."""
