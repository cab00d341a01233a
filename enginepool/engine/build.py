"""Build one upstream Engine on the calling thread, pinned to its devices.

`Engine.__init__` makes temp files, binds a zmq socket, registers an `atexit` hook that kills the
host's children and starts threads that nothing stops. None of it is needed when the scheduler
runs on a thread of ours, so the object is made without it and given the attributes that its
methods read; a test compares them with those of an Engine that upstream built.

Imports sgl_jax: import it only after the patches are applied.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from sgl_jax.srt.entrypoints.engine import Engine
from sgl_jax.srt.layers.attention import native_backend
from sgl_jax.srt.managers.template_manager import TemplateManager
from sgl_jax.srt.sampling import sampling_batch_info
from sgl_jax.srt.server_args import ServerArgs

from enginepool.engine.channel import Channel
from enginepool.engine.scheduler import PinnedScheduler
from enginepool.errors import EnginePoolError, InvalidConfig
from enginepool.process.guest import preserved
from enginepool.weights.leaves import EngineLeaves
from enginepool.weights.sibling import loader_from

_NATIVE_ATTENTION_KNOWS_PAGES = (
    "page_size" in inspect.signature(native_backend.forward_attention).parameters
)


def build_engine(
    server_args: dict[str, Any],
    devices: Sequence[jax.Device],
    channel: Channel,
    source: EngineLeaves | None = None,
) -> Engine:
    """Build an Engine whose scheduler the calling thread must run.

    Its weights are copied from `source`, if given, instead of read (`weights/sibling.py`).
    The caller gives it a `tokenizer_manager` and a `loop` before handing it to users. A failure
    leaves nothing behind: no thread, no file, no process-wide state.
    """
    mesh = Mesh(
        np.array(devices).reshape(1, len(devices)),
        ("data", "tensor"),
        axis_types=(AxisType.Explicit,) * 2,
    )
    with preserved(), jax.default_device(devices[0]):
        args = ServerArgs(**server_args)
        args.check_server_args()
        _check_pages(args)
        templates = TemplateManager()
        templates.initialize_templates(model_path=args.model_path)
        load_format = args.load_format
        if source is not None and load_format != "dummy":
            loader: Any = loader_from(source, mesh)
            args.load_format = loader
        scheduler = PinnedScheduler.__new__(PinnedScheduler)
        try:
            scheduler.__init__(args, mesh, channel)
        except BaseException:
            scheduler.abandon()
            raise
        args.load_format = load_format
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


def _check_pages(args: ServerArgs) -> None:
    """Refuse pages where native attention does not know them (0.0.3rc99): it takes the tail of
    one request's last page for the next request of the batch, and answers wrongly."""
    native = args.attention_backend == "native" or args.device == "cpu"
    if native and args.page_size > 1 and not _NATIVE_ATTENTION_KNOWS_PAGES:
        raise InvalidConfig(
            f"page_size={args.page_size}: the native attention of this sglang-jax mixes up the "
            "requests of a batch with pages; use page_size=1"
        )


def _refuse_shutdown() -> NoReturn:
    raise EnginePoolError("an engine of a pool is closed with its pool: use pool.close()")


def dismantle(engine: Engine) -> None:
    """Give back what an engine holds outside itself, and drop its insides.

    Its front end stays and says why the engine cannot be used any more. On the engine's thread,
    after its loop has ended. Device memory is free once this returned and nobody else holds the
    arrays.
    """
    scheduler = engine.scheduler_info.pop("scheduler", None)
    engine.scheduler_info["status"] = "closed"
    if scheduler is None:
        return
    devices = set(scheduler.mesh.devices.flat)
    # Upstream's cache of zero penalties outlives the engine, and with it device memory.
    penalties = sampling_batch_info._zero_linear_penalty_cache
    for key, array in list(penalties.items()):
        if set(array.devices()) <= devices:
            penalties.pop(key, None)
    scheduler.abandon()
