"""Weights for engines, from a checkpoint or from a trainer.

`sources` recognises what a caller gave and yields named arrays, `mapping` is upstream's own way
from Hugging Face names to a model's leaves, `plan` joins both and validates, `placement` knows
devices, `leaves` are an engine's own. None of them knows workers or requests; `runtime` does.
"""
