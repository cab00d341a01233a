"""Compiles the programs of an engine, built and warmed up as in a pool, for an absent chip."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import patches
from enginepool.config import PoolConfig
from enginepool.dispatch.condition import EngineCondition
from enginepool.dispatch.queue import RequestQueue
from enginepool.doctor.ahead_of_time.record import Compiled, NotLowered, Record
from enginepool.doctor.ahead_of_time.topology import chips_of, libtpu_environment
from enginepool.engine.channel import Channel
from enginepool.engine.gil_limiter import process_limiter
from enginepool.engine.start_stages import StartStages
from enginepool.errors import InvalidConfig
from enginepool.process.precision import MatmulPrecision
from enginepool.sizing.chips import Topology


def compile_programs(
    host: Topology,
    config: dict[str, Any],
    server_args: Mapping[str, Any],
    *,
    tp_size: int = 1,
    max_decode_steps: int = PoolConfig.max_decode_steps,
    kinds: Collection[str] | None = None,
    without: Collection[str] = (),
    further: Callable[[Any, list[Any], Record], None] = lambda *_: None,
    said: Callable[[Compiled], None] = lambda _: None,
) -> Record:
    """Compile the programs of one engine of a pool on this host, and check that its steps need no
    others. Nothing is run.

    The process can do nothing else meanwhile.

    Args:
        config: The model's config.json.
        server_args, max_decode_steps: The options of a pool.
        kinds: The kinds of programs to compile. None: all.
        without: Names of patches to leave out, to see their effect.
        further: A function for programs that no step runs. It is called with scheduler, chips and
            record when the engine is warm.
        said: A function that is called with each program when it is done.
    """
    from enginepool.doctor.ahead_of_time.stand_ins import upstream_without_device

    record = Record(kinds, said)
    hbm_bytes = host.chip.hbm_bytes
    with libtpu_environment(), _patched(without), pool_config(config, tp_size, server_args) as pool:
        chips = chips_of(host)
        args = pool.for_engine("tpu", list(range(tp_size)), hbm_bytes)
        # Programs do not depend on the tokenizer, and the folder has no weights.
        args |= {"skip_tokenizer_init": True, "load_format": "dummy"}
        with upstream_without_device(chips, hbm_bytes, record), suppress(NotLowered):
            _compile(args, chips, record, max_decode_steps, further)
    return record


@contextmanager
def pool_config(
    config: dict[str, Any], tp_size: int, server_args: Mapping[str, Any]
) -> Iterator[PoolConfig]:
    """The configuration of a pool whose model is a folder with this config.json alone."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield PoolConfig(folder, tp_size=tp_size, server_args=server_args)


def _compile(
    server_args: dict[str, Any],
    chips: list[Any],
    record: Record,
    max_decode_steps: int,
    further: Callable[[Any, list[Any], Record], None],
) -> None:
    # Imported here, because the patches must be applied before sgl_jax is imported.
    from enginepool.doctor.ahead_of_time.steps import take_steps
    from enginepool.engine.build import build_engine, dismantle
    from enginepool.engine.warmup import warm_up

    channel = Channel(
        0,
        RequestQueue(),
        process_limiter(),
        EngineCondition(),
        max_decode_steps=max_decode_steps,
    )
    try:
        devices = chips[: server_args["tp_size"]]
        engine: Any = build_engine(server_args, devices, channel, MatmulPrecision(), StartStages())
    except (AssertionError, ValueError) as error:  # upstream refuses sizes in this way
        raise InvalidConfig(f"upstream cannot build such an engine: {error}") from error
    try:
        scheduler = engine.scheduler_info["scheduler"]
        record.listening = True
        # The bytes of all chips together.
        kv_bytes = scheduler.kv_cache.describe()["fused_bytes_total"]
        record.kv_bytes = kv_bytes // server_args["tp_size"]
        record.adapter_specs = list(scheduler.leaves.adapter_specs.values())
        warm_up(scheduler, StartStages())
        further(scheduler, chips, record)
        take_steps(scheduler, channel, record)
    finally:
        dismantle(engine)


@contextmanager
def _patched(without: Collection[str]) -> Iterator[None]:
    """Apply the patches that change programs. Optimisations are left out: they change only the
    host's part of a step, and hold arrays, which do not exist here."""
    if unknown := set(without) - {patch.name for patch in patches.ALL}:
        raise InvalidConfig(f"without: no patch is called {', '.join(sorted(unknown))}")
    wanted = [p for p in patches.ALL if not p.optimisation and p.name not in without]
    applied = patches.apply(wanted)
    try:
        yield
    finally:
        patches.revert(applied)
