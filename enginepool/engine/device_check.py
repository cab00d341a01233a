"""Whether an engine's devices still answer.

A GPU whose context is lost, or a TPU that has halted, raises at every later call of the process. An
engine on it cannot be rebuilt.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

import jax
import numpy as np

_REMEDY = "only a new process can use it again"


def no_answer(devices: Sequence[jax.Device], patience: float | None) -> str | None:
    """Send each device a number and fetch it again.

    Args:
        patience: After this many seconds a device counts as one that does not answer. None: never.

    Returns:
        Which device does not answer, and why. None if all do.
    """
    answer: Future[str | None] = Future()
    # A daemon: it may wait for ever.
    threading.Thread(
        target=_ask, args=(devices, answer), name="enginepool-device-check", daemon=True
    ).start()
    try:
        return answer.result(patience)
    except TimeoutError:
        ids = [device.id for device in devices]
        return f"one of the devices {ids} has not answered for {patience:g} s; {_REMEDY}"


def _ask(devices: Sequence[jax.Device], answer: Future[str | None]) -> None:
    for device in devices:
        try:
            np.asarray(jax.device_put(np.zeros(1, np.int32), device))
        except Exception as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                continue  # the device answers; a rebuild frees memory
            answer.set_result(f"device {device.id} does not answer any more ({error}); {_REMEDY}")
            return
    answer.set_result(None)
