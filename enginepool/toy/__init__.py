"""A toy language model that adds (or subtracts), small enough to ship in the wheel.

Two checkpoints of one network answer the same prompt differently: to ``12+7=`` the one called
"add" says 19 and the one called "subtract" says 5, so a person can see which weights an engine
holds.  Importing this package does not import the model's code.
"""

from pathlib import Path

NAMES = ("add", "subtract", "half")


def checkpoint(name: str = "add") -> Path:
    """Directory of a shipped checkpoint, to be given to an engine as its ``model_path``.

    Args:
        name: "add" (answers ``a+b=`` with a + b), "subtract" (answers it with a - b) or "half" (an
            adder whose training was ended early, which gets about half of the sums right: where
            reinforcement learning can begin).

    Raises:
        ValueError: no toy checkpoint has that name.
    """
    if name not in NAMES:
        known = ", ".join(repr(known) for known in NAMES)
        raise ValueError(f"no toy checkpoint is called {name!r}; there are {known}")
    return Path(__file__).parent / name
