"""LoRA adapters: read, checked, kept on the host, and held in slots beside an engine's weights."""
