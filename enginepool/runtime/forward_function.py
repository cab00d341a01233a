"""Exports an engine's forward to a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginepool.runtime.runtime import Runtime
from enginepool.runtime.update_lock import updating

if TYPE_CHECKING:
    from enginepool.engine.exported_forward import ExportedForward


def forward_function(runtime: Runtime) -> ExportedForward:
    """See `EnginePool.forward_function`."""
    with updating(runtime, "forward_function()") as (worker, *_):
        runtime.swap_programs.stop()  # it uses the mapping of names, too

        def export() -> ExportedForward:
            from enginepool.engine.exported_forward import ExportedForward  # after the patches

            return ExportedForward(worker.scheduler)

        exported = worker.channel.run(export).result()
    exported.probe()
    return exported
