"""How many requests and tokens a pool has served."""

from __future__ import annotations

import threading

from enginepool.requests.request import Request


class Counts:
    """What has ended so far. Added to under the lock; read as it is."""

    def __init__(self) -> None:
        self.finished = self.aborted = self.prompt_tokens = self.completion_tokens = 0
        self._lock = threading.Lock()

    def add(self, request: Request) -> None:
        aborted = (request.finish_reason or {}).get("type") == "abort"
        with self._lock:
            self.finished += not aborted
            self.aborted += aborted
            self.prompt_tokens += len(request.input_ids)
            self.completion_tokens += len(request.output_ids)
