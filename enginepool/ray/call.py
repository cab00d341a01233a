"""The outputs of a caller, and how the caller gets them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enginepool import PoolClosed, PoolFailed, RequestsFailed
from enginepool.ray.wire import Attempt

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
        latest: The output so far, as a result. In the end it is the result.
        lost_on: The lost host that was running it. None as soon as it has a new token.
    """

    call: RayCall
    position: int
    input_ids: list[int]
    sampling_params: Mapping[str, Any] | None
    options: Mapping[str, Any]
    prompt_index: int
    sample_index: int
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
        if params is not None and self.suspect:
            params = {**params, "stream_interval": 1}  # its next token proves it harmless
        if self.latest is not None and self.tokens:
            options = {**options, "partial_outputs": [self.latest]}
            if params is not None:  # its random stream goes on, too
                params = {**params, "sampling_seed": self.latest["meta_info"]["sampling_seed"]}
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
        meta = self._without_tokens() | result["meta_info"] | {"finish_reason": reason}
        self.call.finish(self, result | {"meta_info": meta})

    def _without_tokens(self) -> dict[str, Any]:
        """The `meta_info` of an output that no host has begun."""
        asked = self.options.get
        meta: dict[str, Any] = {
            "id": "",
            "prompt_tokens": len(self.input_ids),
            "completion_tokens": 0,
            "cached_tokens": 0,
            "host_index": None,
            "engine_index": None,
            "prompt_index": self.prompt_index,
            "sample_index": self.sample_index,
            "weight_version": self.call.weight_version,
            "weight_versions": [],
            "prompt_weight_versions": [],
        }
        if (adapter := asked("lora_path")) is not None:
            meta |= {"lora_path": adapter, "lora_versions": []}
        if asked("return_logprob") or asked("top_logprobs_num"):
            meta["output_token_logprobs"] = []
        if asked("top_logprobs_num"):
            meta["output_top_logprobs"] = []
        if asked("return_sampling_mask"):
            meta["output_sampling_mask"] = {"indptr": [0], "ids": [], "too_many": []}
            meta["output_token_sampling_logprobs"] = []
        if asked("return_routed_experts"):
            meta["routed_experts"] = ""
        if asked("return_prompt_logprob"):
            meta |= {
                "logprob_start_len": asked("logprob_start_len") or 0,
                "input_token_logprobs": [],
                "input_logprobs_weight_version": None,
            }
            meta |= {"input_top_logprobs": []} if asked("top_logprobs_num") else {}
        return meta


class RayCall:
    """The outputs of one call. The fleet's thread calls `finish`, `show` and `fail`."""

    def __init__(self, *, every: bool, weight_version: int | str = 0) -> None:
        """
        Args:
            every: Whether its caller wants the tokens of unfinished outputs.
            weight_version: The version when the call was made. Outputs without a token report it,
                as in a pool.
        """
        self.weight_version = weight_version
        self.outputs: list[Output] = []
        self.failure: Exception | None = None
        self.last_hosts: dict[Hashable, int] = {}
        self.done = threading.Event()
        self.news: queue.SimpleQueue[Output | None] = queue.SimpleQueue()
        self._every = every
        self._remaining = 0

    def fill(
        self,
        checked: Sequence[tuple[list[int], int]],
        sampling_params: Any,
        options: Mapping[str, Any],
        indices: Sequence[int] | None,
    ) -> None:
        """Make the outputs, n for each prompt.

        Args:
            checked: Each prompt's ids and how many samples are wanted.
        """
        starts = options.get("logprob_start_len")
        for place, (ids, count) in enumerate(checked):
            index = place if indices is None else indices[place]
            params = sampling_params
            if not (params is None or isinstance(params, Mapping)):
                params = params[place]
            if params is not None:
                interval = params.get("stream_interval") or (1 if self._every else _REPORT_EVERY)
                params = {**params, "n": 1, "stream_interval": interval}
            group = hash(tuple(ids[:_SHARED])) if len(ids) >= _SHARED else (id(self), place)
            own = dict(options)
            if not isinstance(options.get("lora_path"), str | None):
                own["lora_path"] = options["lora_path"][place]
            if starts is not None and not isinstance(starts, int):
                own["logprob_start_len"] = starts[place]
            for sample in range(count):
                own = {**own, "prompt_indices": [index], "sample_indices": [sample]}
                position = len(self.outputs)
                self.outputs.append(Output(self, position, ids, params, own, index, sample, group))
        self._remaining = len(self.outputs)

    def show(self, output: Output) -> None:
        if self._every:
            self.news.put(output)

    def finish(self, output: Output, result: dict[str, Any]) -> None:
        if output.done:
            return
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
