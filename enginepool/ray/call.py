"""The outputs of a caller, and how the caller gets them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enginepool import PoolClosed, PoolFailed, RequestsFailed
from enginepool.ray.wire import Attempt, Prepared

# Prompts that share this many first tokens stay together.
_SHARED = 64
# Tokens between two reports of a host. Tokens that a lost host has not reported are made again.
_REPORT_EVERY = 16


@dataclass(eq=False)
class Output:
    """One sample of one prompt.

    Attributes:
        position: Its position in the results of its call.
        options: The options of an `Attempt`, without the tokens so far.
        meta: The `meta_info` of its result if it ends without a token.
        latest: The output so far, as a result. In the end it is the result.
        lost_on: The lost host that was running it. None as soon as it has a new token.
    """

    call: RayCall
    position: int
    input_ids: list[int]
    sampling_params: Mapping[str, Any]
    options: Mapping[str, Any]
    meta: Mapping[str, Any]
    group: Hashable
    latest: dict[str, Any] | None = None
    done: bool = False
    lost_on: int | None = None

    @property
    def suspect(self) -> bool:
        """Whether it may be the reason for a lost host."""
        return self.lost_on is not None

    @property
    def tokens(self) -> int:
        return 0 if self.latest is None else len(self.latest["output_ids"])

    def attempt(self, key: int) -> Attempt:
        """The next attempt, which continues the output so far."""
        params, options = self.sampling_params, self.options
        if self.suspect:
            params = {**params, "stream_interval": 1}  # its next token proves it harmless
        if self.tokens:
            options = {**options, "partial_outputs": [self.latest]}
        return Attempt(key, self.input_ids, params, options)

    def gain(self, chunk: dict[str, Any]) -> None:
        """Take the output's newest tokens."""
        before, self.latest = self.tokens, chunk
        if self.tokens > before:
            self.lost_on = None

    def lost_with(self, host: int) -> bool:
        """Record that a host was lost while it ran this output. Returns whether the output may
        continue. After two hosts it may not."""
        if self.lost_on is not None:
            message = (
                f"hosts {self.lost_on} and {host} were lost while they ran this output, and it got "
                "no token in between"
            )
            self.end("poisoned", message)
            return False
        self.lost_on = host
        return True

    def end(self, err_type: str, message: str) -> None:
        """End the output with the tokens so far."""
        result = self.latest or {"text": "", "output_ids": [], "meta_info": {}}
        reason = {"type": "abort", "message": message, "err_type": err_type}
        meta = {**self.meta, **result["meta_info"], "finish_reason": reason}
        self.call.finish(self, result | {"meta_info": meta})


class RayCall:
    """The outputs of one call. The fleet's thread calls `finish`, `show` and `fail`.

    Attributes:
        first_updates: By adapter of the call: its entry in `Fleet.first_updates` when the call was
            made.
    """

    def __init__(
        self,
        prepared: Sequence[Prepared],
        options: Mapping[str, Any],
        *,
        every: bool,
        first_updates: Mapping[str, int] | None = None,
    ) -> None:
        """
        Args:
            options: The options of all its prompts, as `EnginePool.stream` takes them.
            every: Whether its caller wants the tokens of unfinished outputs.
        """
        self.first_updates = first_updates or {}
        self.failure: Exception | None = None
        self.last_hosts: dict[Hashable, int] = {}
        self.done = threading.Event()
        self.news: queue.SimpleQueue[Output | None] = queue.SimpleQueue()
        self._every = every
        self._made_at = time.perf_counter()
        self.outputs = [
            self._output(position, one, options) for position, one in enumerate(prepared)
        ]
        self._remaining = len(self.outputs)

    def _output(self, position: int, one: Prepared, options: Mapping[str, Any]) -> Output:
        ids, params, meta = one.input_ids, one.sampling_params, one.meta
        interval = params.get("stream_interval") or (1 if self._every else _REPORT_EVERY)
        # With a seed, a host that continues the output goes on with its random stream.
        seed = meta["sampling_seed"]
        params = {**params, "n": 1, "sampling_seed": seed, "stream_interval": interval}
        own = {name: meta[name] for name in ("lora_path", "logprob_start_len") if name in meta}
        own |= {"prompt_indices": [meta["prompt_index"]], "sample_indices": [meta["sample_index"]]}
        group = (id(self), meta["prompt_index"])
        if len(ids) >= _SHARED:
            group = hash(tuple(ids[:_SHARED]))
        meta = {**meta, "host_index": None}
        return Output(self, position, ids, params, {**options, **own}, meta, group)

    def show(self, output: Output) -> None:
        if self._every:
            self.news.put(output)

    def finish(self, output: Output, result: dict[str, Any]) -> None:
        if output.done:
            return
        # Its host knows only how long it ran there.
        result["meta_info"]["e2e_latency"] = time.perf_counter() - self._made_at
        output.latest, output.done = result, True
        self._remaining -= 1
        self.news.put(output)
        if not self._remaining:
            self.close()

    def fail(self, error: Exception) -> None:
        """End the unfinished outputs. The waiting caller raises the error."""
        self.failure = self.failure or error
        for output in self.outputs:
            if not output.done:
                output.end(type(error).__name__, str(error))
        self.close()

    def close(self) -> None:
        self.news.put(None)
        self.done.set()

    def results(self, raise_on_error: bool = False) -> list[dict[str, Any]]:
        """All results, in order.

        Raises:
            RequestsFailed, PoolFailed, PoolClosed, InvalidRequest: As `EnginePool`'s calls.
        """
        results = [output.latest or {} for output in self.outputs]
        if isinstance(self.failure, PoolFailed | PoolClosed):  # other calls may have it, too
            raise type(self.failure)(str(self.failure), results=results)
        if self.failure is not None:
            raise self.failure
        if raise_on_error:
            RequestsFailed.check(results)
        return results
