"""Weights for engines, from a checkpoint or from a trainer.

`sources` recognises a caller's source and reads it as named arrays. `mapping` makes a model's
leaves from Hugging Face tensors, by upstream's own code. `plan` joins and checks both. `placement`
knows devices. `leaves` holds an engine's weights. Only `runtime` knows workers and requests.
"""
