"""How the toy's checkpoints were trained; no part of the package."""
