"""Builds an engine on its thread, resets or rebuilds it, and takes it apart.

Reaches into upstream's Engine and its caches.

What breaks: `Engine.__init__` makes temp files, binds a zmq socket, registers an `atexit` hook
that kills the host's children, and starts threads that nothing stops. Upstream's cache of zero
penalties keeps device memory of engines that are gone.
Why: An Engine expects to be alone in its process. Its scheduler has another process, or a thread
that lives as long as the process.
Remove when: An Engine takes a scheduler that its caller runs, and gives back what it holds.

None of that is needed when the scheduler runs on a thread of ours. So the object is made without
`__init__`, and gets the attributes that its methods read. A test compares these with the attributes
that upstream sets. The cache of zero penalties is cleared if this upstream has it.

Functions import sgl_jax when they are called: its import has side effects, and the patches must
come first.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from enginepool.engine.channel import Channel
from enginepool.engine.config_reads import check_made, check_model
from enginepool.engine.start_stages import StartStages
from enginepool.engine.teardown import dispose
from enginepool.errors import EnginePoolError, InvalidConfig
from enginepool.process.host_state import preserved
from enginepool.process.precision import MatmulPrecision
from enginepool.process.single_process import as_single_process

if TYPE_CHECKING:
    from sgl_jax.srt.entrypoints.engine import Engine
    from sgl_jax.srt.server_args import ServerArgs

    from enginepool.engine.scheduler import PinnedScheduler
    from enginepool.weights.leaves import EngineLeaves


class Assembly:
    """Makes upstream's Engine and its parts. Used on the engine's thread only.

    Attributes:
        engine: Upstream's Engine, once it is built. It is an empty shell after `take_apart`, and
            another object after `rebuild`.
        leaves: The engine's weights.
        precision: The matmul precision of every program that is traced for the engine, also after
            `rebuild`.
        start: The progress of the latest build and warm-up, and the seconds that they took.
    """

    def __init__(
        self,
        server_args: dict[str, Any],
        devices: Sequence[jax.Device],
        channel: Channel,
        start: StartStages,
    ) -> None:
        self.engine: Engine | None = None
        self.leaves: EngineLeaves | None = None
        self.precision = MatmulPrecision()
        self.start = start
        self.build_seconds = self.warmup_seconds = 0.0
        self._server_args = server_args
        self._devices = devices
        self._channel = channel
        self._compile_programs = False

    @property
    def scheduler(self) -> PinnedScheduler | None:
        """Upstream's scheduler, even while the engine takes no jobs. None before it is built and
        after it is taken apart."""
        return self.engine.scheduler_info.get("scheduler") if self.engine is not None else None

    def build(self, source: EngineLeaves | None = None) -> None:
        """Build the engine. If `source` is given, copy its weights instead of reading them."""
        self._build(self._server_args, source)

    def warm_up(self, *, compile_programs: bool) -> None:
        """Compile every program. Without `compile_programs`, requests compile what they need."""
        from enginepool.engine.warmup import warm_up

        self._compile_programs = compile_programs
        started = time.perf_counter()
        if compile_programs:
            with self.start.listening(), self.start.stage("warm_up"):
                warm_up(self.built(), self.start)
        self.warmup_seconds = time.perf_counter() - started

    def reset(self) -> None:
        """Renew the scheduler's state and the KV cache. Weights and programs stay.

        The engine's requests must have been taken out before.
        """
        scheduler = self.built()
        scheduler.reset()
        self._channel.attach(scheduler)

    def rebuild(self, *, dummy_weights: bool) -> None:
        """Renew everything, with the checkpoint's weights or with placeholders."""
        self.take_apart()
        changed = {"load_format": "dummy"} if dummy_weights else {}
        self._build({**self._server_args, **changed})
        self.warm_up(compile_programs=self._compile_programs)

    def built(self) -> PinnedScheduler:
        """Upstream's scheduler. The engine must be built."""
        scheduler = self.scheduler
        assert scheduler is not None, "the engine is not built"
        return scheduler

    def take_apart(self) -> None:
        if self.engine is not None:
            dismantle(self.engine)

    def _build(self, server_args: dict[str, Any], source: EngineLeaves | None = None) -> None:
        started = time.perf_counter()
        self.start.clear()
        with self.start.listening():
            engine: Any = build_engine(
                server_args, self._devices, self._channel, self.precision, self.start, source
            )
            if (old := self.engine) is not None:  # before the check below, which may fail
                engine.tokenizer_manager, engine.loop = old.tokenizer_manager, old.loop
            self.engine = engine
            scheduler = self.built()
            self.leaves = scheduler.leaves
            # A copy, or an engine rebuilt with placeholders, has a model that was checked.
            if source is None and server_args.get("load_format") != "dummy":
                runner = scheduler.tp_worker.worker.model_runner
                with self.start.stage("check"), self.precision.on_this_thread():
                    check_model(runner, engine.server_args, scheduler.config_reads)
        self._channel.attach(scheduler)
        self.build_seconds = time.perf_counter() - started


def build_engine(
    server_args: dict[str, Any],
    devices: Sequence[jax.Device],
    channel: Channel,
    precision: MatmulPrecision,
    start: StartStages,
    source: EngineLeaves | None = None,
) -> Engine:
    """Build an Engine whose scheduler the calling thread must run.

    If `source` is given, its weights are copied instead of read (`weights/loader.py`). `precision`
    records the value that upstream chooses, and is in effect while the engine is built. The caller
    sets `tokenizer_manager` and `loop` before users get the Engine. A failure leaves nothing
    behind: no thread, no file, no process-wide state.
    """
    with start.stage("import"):
        from sgl_jax.srt.entrypoints.engine import Engine
        from sgl_jax.srt.managers.template_manager import TemplateManager
        from sgl_jax.srt.server_args import ServerArgs

    mesh = Mesh(
        np.array(devices).reshape(1, len(devices)),
        ("data", "tensor"),
        axis_types=(AxisType.Explicit,) * 2,
    )
    with (
        start.stage("build"),
        preserved(),
        precision.building(),
        as_single_process(),
        jax.default_device(devices[0]),
    ):
        args = ServerArgs(**server_args)
        args.check_server_args()
        _check_pages(args)
        templates = TemplateManager()
        templates.initialize_templates(model_path=args.model_path)
        scheduler = _build_scheduler(args, mesh, channel, start, source)
    engine: Any = Engine.__new__(Engine)
    engine.server_args = args
    engine.port_args = None
    engine.send_to_rpc = None
    engine.tokenizer_manager = None
    engine.template_manager = templates
    engine.default_sampling_params = None
    engine.loop = None
    engine.scheduler_info = {
        "status": "ready",
        "max_total_num_tokens": scheduler.max_total_num_tokens,
        "max_req_input_len": scheduler.max_req_input_len,
        "scheduler": scheduler,
    }
    engine.shutdown = _refuse_shutdown
    return engine


def _build_scheduler(
    args: ServerArgs,
    mesh: Mesh,
    channel: Channel,
    start: StartStages,
    source: EngineLeaves | None,
) -> PinnedScheduler:
    from enginepool.engine.scheduler import PinnedScheduler
    from enginepool.weights.loader import loader_for

    load_format = args.load_format
    dummy = load_format == "dummy"
    # Upstream's dummy loader makes all weights in the model's dtype, before it quantizes.
    if not dummy or args.quantization_config_path:
        check = functools.partial(check_made, args)
        reading = functools.partial(start.stage, "read_weights")
        loader: Any = loader_for(mesh, source, check, reading, dummy=dummy)
        args.load_format = loader  # upstream takes a class, too
    scheduler = PinnedScheduler.__new__(PinnedScheduler)
    try:
        scheduler.__init__(args, mesh, channel)
    except BaseException:
        dispose(scheduler)
        raise
    args.load_format = load_format
    return scheduler


def _check_pages(args: ServerArgs) -> None:
    """Refuse pages of several tokens if native attention does not know pages.

    What breaks: With pages of several tokens 0.0.3rc99 answers wrongly.
    Why: Its native attention mistakes the tail of one request's last page for the next request of
    the batch.
    Remove when: Every supported version knows pages: its `forward_attention` takes `page_size`.
    """
    from sgl_jax.srt.layers.attention import native_backend

    native = args.attention_backend == "native" or args.device == "cpu"
    if not native or args.page_size <= 1:
        return
    if "page_size" not in inspect.signature(native_backend.forward_attention).parameters:
        raise InvalidConfig(
            f"page_size={args.page_size}: the native attention of this sglang-jax mixes up the "
            "requests of a batch with pages; use page_size=1"
        )


def _refuse_shutdown() -> NoReturn:
    raise EnginePoolError("an engine of a pool is closed with its pool: use pool.close()")


def dismantle(engine: Engine) -> None:
    """Free everything that an engine holds. On the engine's thread, after its loop has ended.

    Its front end stays, and says why the engine cannot be used any more. Device memory is free once
    this has returned, unless other code holds the arrays.
    """
    from sgl_jax.srt.sampling import sampling_batch_info

    scheduler = engine.scheduler_info.pop("scheduler", None)
    engine.scheduler_info["status"] = "closed"
    if scheduler is None:
        return
    devices = set(scheduler.mesh.devices.flat)
    penalties = getattr(sampling_batch_info, "_zero_linear_penalty_cache", {})
    for key, array in list(penalties.items()):
        if set(array.devices()) <= devices:
            penalties.pop(key, None)
    dispose(scheduler)
