"""The host's process: restores its state, tunes it on request, detects forks."""
