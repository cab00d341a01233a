"""Opens a pool: applies patches, starts engines one after the other, makes the input processor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

import patches
from enginepool.config import PoolConfig, Warmup
from enginepool.engine.start_stages import StartStages
from enginepool.engine.worker import EngineWorker
from enginepool.errors import EngineStartFailed, InvalidConfig, InvalidWeights, PatchFailed
from enginepool.frontend.generation_defaults import GenerationDefaults
from enginepool.frontend.grammar_compiler import GrammarCompiler
from enginepool.frontend.input_processor import InputProcessor
from enginepool.frontend.limits import Limits
from enginepool.frontend.tokenizer import Tokenizer
from enginepool.logs import logger
from enginepool.lora.adapter import Adapters
from enginepool.model_config.generation import end_ids
from enginepool.model_config.tokenizer import check_tokenizer_class
from enginepool.process.tuning import frozen
from enginepool.sizing import rules

_lock = threading.Lock()
_open_pools = 0
_applied: list[Any] = []
_WORDS = {
    "patches": "applies patches",
    "checkpoint": "looks at the checkpoint",
    "engines": "starts engines",
    "front_end": "loads the tokenizer",
    "import": "imports sglang-jax",
    "build": "is built",
    "read_weights": "reads weights",
    "check": "is checked",
    "warm_up": "warms up",
}


@contextmanager
def patched() -> Iterator[None]:
    """Apply the patches that are needed while any pool is open. The last block reverts them.

    Raises:
        PatchFailed: A patch does not fit upstream, or other code has patched the same place since.
    """
    global _open_pools
    with _lock:
        if _open_pools == 0:
            with _as_ours():
                applied = patches.apply()
            for patch in applied:
                logger().debug("enginepool.patch_applied", name=patch.name, issue=patch.issue)
            # An earlier pool may have left patches that it could not revert
            _applied.extend(applied)
        _open_pools += 1  # last: if a patch cannot be applied, there is nothing to revert
    try:
        yield
    finally:
        with _lock:
            _open_pools -= 1
            if _open_pools == 0:
                with _as_ours():
                    patches.revert(_applied)
                _applied.clear()


@contextmanager
def _as_ours() -> Iterator[None]:
    """Turn the error of `patches` into `PatchFailed`. `patches` does not import enginepool."""
    try:
        yield
    except patches.PatchError as error:
        raise PatchFailed(str(error)) from error


def advise(config: PoolConfig, args: Mapping[str, Any], free_bytes: int | None) -> None:
    """Before engines are built, log what is wrong with these `ServerArgs` on a TPU, and which
    staging of `update_weights` their memory allows."""
    for entry in config.tpu_advice(args, free_bytes):
        logger().warning("enginepool.tpu_advice", problem=entry.problem, remedy=entry.remedy)
    memory = config.tpu_memory(args, free_bytes)
    if memory is not None:
        logger().info(
            "enginepool.tpu_memory",
            mem_fraction_static=memory.settings.fraction,
            kv_tokens=memory.kv_tokens,
            max_running_requests=memory.max_running_requests,
            staging=rules.staging(memory),
        )


def start_workers(
    workers: Sequence[EngineWorker],
    warmup: Warmup,
    on_engine: Callable[[EngineWorker], None] | None,
) -> None:
    """Start the engines' threads and wait until all serve.

    Builds never overlap, because they change process-wide state and restore it. Warm-ups overlap
    with each other and with builds, if asked for. The first engine reads the weights; the others
    copy them. Tracing makes many objects, which triggers full garbage collections. They skip the
    objects that exist after each build.

    Args:
        on_engine: Called each time an engine begins to serve, to show progress.

    Raises:
        EngineStartFailed: An engine did not start. The caller closes the others.
        InvalidConfig: The model's configuration asks for something that an engine does not compute.
        InvalidWeights: The checkpoint's files do not fit that configuration.
    """
    batches = [workers] if warmup == "parallel" else [[worker] for worker in workers]
    with ExitStack() as until_all_serve:
        for batch in batches:
            for worker in batch:
                worker.start(source=workers[0].assembly.leaves)
                _wait_for_build(worker, batch)
                until_all_serve.enter_context(frozen())
                worker.warm_up(compile_programs=warmup != "none")
            for worker in batch:
                _wait(worker, worker.warm)
                logger().info(
                    "enginepool.engine_started",
                    engine=worker.index,
                    of=len(workers),
                    **worker.assembly.start.report(),
                )
                if on_engine is not None:
                    on_engine(worker)


def _wait_for_build(worker: EngineWorker, batch: Sequence[EngineWorker]) -> None:
    try:
        _wait(worker, worker.built)
    except (EngineStartFailed, InvalidConfig, InvalidWeights):
        # An earlier engine may be the cause: its warm-up failed, so its weights are gone.
        for earlier in batch:
            if earlier.warm.done():
                _wait(earlier, earlier.warm)
        raise


def read_defaults(config: PoolConfig) -> GenerationDefaults:
    """Read the defaults of calls without sampling parameters, before any engine is built.

    Raises:
        InvalidConfig: They cannot be read, or the tokenizer cannot be loaded.
    """
    args = config.server_args
    revision, trusted = args.get("revision"), bool(args.get("trust_remote_code"))
    check_tokenizer_class(args.get("tokenizer_path") or config.model, revision, trusted)
    return GenerationDefaults.read(config.model, revision, args.get("preferred_sampling_params"))


def make_input_processor(
    workers: Sequence[EngineWorker], defaults: GenerationDefaults, adapters: Adapters, name: str
) -> InputProcessor:
    """Make what checks and tokenizes prompts. Its limits are those of the smallest engine: a device
    that is also used by something else has room for less KV cache."""
    engines: list[Any] = [worker.engine for worker in workers]
    args = engines[0].server_args
    scheduler = min(
        (engine.scheduler_info["scheduler"] for engine in engines),
        key=lambda scheduler: scheduler.max_req_len,
    )
    model, program = scheduler.model_config, scheduler.prefill_program
    tokenizer = Tokenizer.load(args)
    ends = end_ids(model.hf_eos_token_id, tokenizer.hf)
    limits = Limits(
        # Upstream's own arithmetic: it refuses a prompt of `max_req_input_len`, and cuts an
        # output at `max_req_len` - prompt - 1.
        prompt=scheduler.max_req_input_len - 1,
        total=scheduler.max_req_len - 1,
        vocab_size=model.vocab_size,
        origin=(
            f"context_length={model.context_len}, max_total_tokens={scheduler.max_total_num_tokens}"
        ),
        end_ids=frozenset(end for end in ends if end < model.vocab_size),
        # Nothing follows the last token, so it takes no KV cache.
        scored=min(model.context_len, scheduler.max_total_num_tokens + 1, program.slots + 1),
        score_refusal=program.refusal,
        routing=scheduler.routed_experts and scheduler.routed_experts.routing,
    )
    json_options = {
        "whitespace_flexible": not args.constrained_json_disable_any_whitespace,
        "whitespace_pattern": args.constrained_json_whitespace_pattern,
    }
    grammars = GrammarCompiler(tokenizer, limits.vocab_size, json_options, name)
    return InputProcessor(tokenizer, limits, defaults, grammars, adapters)


def _wait(worker: EngineWorker, future: Future[None]) -> None:
    try:
        future.result()
    except (InvalidConfig, InvalidWeights):
        raise  # the checkpoint's fault, not the device's
    except Exception as error:
        ids = [device.id for device in worker.devices]
        raise EngineStartFailed(
            f"engine {worker.index} on device {ids} did not start: {error}",
            engine_index=worker.index,
            device_ids=ids,
        ) from error


def describe_opening(
    name: str, stages: StartStages, workers: Sequence[EngineWorker], seconds: float
) -> str:
    """Describe the stage of a pool's opening, which began this many seconds ago."""
    worker = next((each for each in workers if not each.warm.done()), None)
    if worker is None or (now := worker.assembly.start.now) is None:
        return f"{name} {_WORDS.get(stages.now or '', 'opens')}, {seconds:.0f} s"
    engine, start = f"engine {worker.index + 1} of {len(workers)}", worker.assembly.start
    doing = _WORDS[now]
    if now == "warm_up" and start.bucket:
        doing = f"compiles {start.bucket} of {start.buckets}"
    return f"{name}: {engine} {doing}, {seconds:.0f} s"
