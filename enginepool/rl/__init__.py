"""Helpers for a training loop around a pool. The package is no trainer.

Arrays are NumPy's. Only `sampling_logprobs` imports JAX, when it is called. The package is an
adapter and uses the public API only.
"""

from enginepool.rl.advantages import group_advantages
from enginepool.rl.agreement import Agreement, WorstToken, agreement
from enginepool.rl.batch import RolloutBatch, pad_results
from enginepool.rl.importance import importance_weights
from enginepool.rl.renormalised import sampling_logprobs
from enginepool.rl.replay import Replay, replay

__all__ = [
    "Agreement",
    "Replay",
    "RolloutBatch",
    "WorstToken",
    "agreement",
    "group_advantages",
    "importance_weights",
    "pad_results",
    "replay",
    "sampling_logprobs",
]
