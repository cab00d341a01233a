"""What commands say when something is wrong, and where their output goes."""
