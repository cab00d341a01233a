"""A toy language model that adds or subtracts, small enough to ship in the wheel.

Its checkpoints answer the same prompt differently: to ``12+7=`` "add" says 19 and "subtract" says
5. So a person can see which weights an engine has. Importing this package does not import the
model's code.
"""

from pathlib import Path

NAMES = ("add", "subtract", "half")


def checkpoint(name: str = "add") -> Path:
    """The directory of a shipped checkpoint, to be given to an engine as its ``model_path``.

    Args:
        name: "add" answers ``a+b=`` with a + b, "subtract" with a - b. "half" adds, but its
            training ended early: it gets about half of the sums right, and reinforcement learning
            can improve it.

    Raises:
        ValueError: No toy checkpoint has that name.
    """
    if name not in NAMES:
        known = ", ".join(repr(known) for known in NAMES)
        raise ValueError(f"no toy checkpoint is called {name!r}; there are {known}")
    return Path(__file__).parent / name
