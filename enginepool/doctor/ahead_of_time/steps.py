"""Checks that no step needs a program that the warm-up has not compiled.

The engine that was built and warmed up for an absent chip serves requests through its own queue,
channel and loop. Results of programs are zeros, but each step asks for the same program as on the
chip. After the warm-up, the record counts any new program as a mistake.

A step's shape is upstream's bucket of its decode requests or its prefill tokens. The check tries
all numbers of requests, and both ends of every bucket of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np

from enginepool.dispatch.request import Call, Request
from enginepool.doctor.ahead_of_time.record import Record
from enginepool.engine.channel import Channel
from enginepool.engine.jobs import StopEngine
from enginepool.frontend.sampling import make_sampling
from enginepool.lora.adapter import Adapter

# Sampling options. The check tries each alone, and then all in one batch.
_SAMPLING: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"frequency_penalty": 1.0},
    {"presence_penalty": -1.0},
    {"min_new_tokens": 2},
)


def take_steps(scheduler: Any, channel: Channel, record: Record) -> None:
    """Serve requests of every shape. Programs that did not exist before are problems."""
    # Upstream's penalties read only these ids of a tokenizer, and no tokenizer was built.
    scheduler.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=1)
    channel.attach(scheduler)
    channel.queue.attach(channel.engine_index, channel.condition, channel.load, channel.wake)
    record.warm = True
    for requests in _waves(scheduler):
        _serve(scheduler, channel, requests)
    record.steps, record.steady_steps = channel.steps, channel.steady_steps


def _serve(scheduler: Any, channel: Channel, requests: list[Request]) -> None:
    call = requests[0].call
    call.on_finish = lambda _: channel.stop() if call.done else None
    channel.queue.put(requests)
    with suppress(StopEngine):
        scheduler.event_loop_normal()


def _waves(scheduler: Any) -> Iterator[list[Request]]:
    """Groups of requests that run at the same time."""
    manager = scheduler.tp_worker.worker.compilation_manager
    vocabulary = scheduler.model_config.vocab_size
    longest = scheduler.max_req_input_len
    batch, chunk = manager.max_padded_batch_size, manager.max_padded_num_tokens
    starts = iter(range(2, 1 << 30))  # no two prompts share a prefix

    def make(*wanted: tuple[int, int, Mapping[str, Any]]) -> list[Request]:
        call = Call()
        for length, tokens, params in wanted:
            start = next(starts) % vocabulary
            sampling = make_sampling(
                # Every request of a pool has a seed.
                {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": start, **params},
                vocab_size=vocabulary,
                tokenizer=None,
            )
            call.add(Request(call, [start] + [0] * (length - 1), sampling.params))
        return call.requests

    # These requests end one after the other, so that batches of every size run. Some find no room
    # at first, and join the others later.
    yield make(*((1, min(1 + n, longest), {}) for n in range(batch + 3)))
    for least, most in zip([0, *manager.token_buckets], manager.token_buckets, strict=False):
        for length in {least + 1, most}:
            if length <= longest:
                yield make((length, 1, {}))
    if chunk < longest:
        yield make((chunk + 1, 2, {}), (min(2 * chunk, longest), 2, {}), (1, 4, {}))
    for params in _SAMPLING:
        yield make((3, 3, params), (5, 2, params))
    yield make(*((3, 3, params) for params in _SAMPLING[:batch]))
    again = make((min(2 * manager.page_size + 1, longest), 4, {}))
    for request in again:
        request.top_logprobs_num = 5
    yield again
    yield _resumed(again[0])
    named = make((3, 3, {}), (5, 2, {}))
    named[0].named_ids = [0]
    yield named
    if scheduler.adapters is not None:
        mixed = make((3, 3, {}), (5, 2, {}), (3, 3, {}))
        for number, request in enumerate(mixed[1:], 1):
            request.adapter = _adapter(number, scheduler.adapters.layers)
        yield mixed


def _adapter(number: int, layers: Mapping[str, tuple[int, int]]) -> Adapter:
    sides = {
        path: (np.zeros((1, size_in)), np.zeros((size_out, 1)))
        for path, (size_in, size_out) in layers.items()
    }
    return Adapter(str(number), number, number, 1.0, {}, sides)


def _resumed(done: Request) -> list[Request]:
    """A request with the same prompt, whose pages the prefix cache has, and with outputs so far."""
    call = Call()
    request = Request(call, done.input_ids, done.sampling)
    request.output_ids, request.logprobs = [0, 0], [0.0, 0.0]
    call.add(request)
    return call.requests
