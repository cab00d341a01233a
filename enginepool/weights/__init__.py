"""Weights for engines, from a checkpoint or from a trainer.

`sources` recognises a caller's source and reads it as named arrays. `mapping` makes a model's
leaves from Hugging Face tensors, by upstream's own code. `plan` matches a source to a model and
checks it. `placement` puts arrays on devices. `leaves` holds an engine's weights. Nothing here
knows workers and requests: only `runtime` does.
"""
