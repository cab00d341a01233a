"""The caller's side: arguments become a `Call`, finished requests become results."""
