"""No thread for statistics of routed experts that nobody reads.

What breaks: An engine that nobody uses any more is never freed, nor are its weights and its KV
cache. At every step a thread wakes without work, and takes the GIL from others.

Why: `ModelWorker` starts a thread that waits for the routed experts of every step, also when the
options that read them are off. The thread never ends, and holds the worker.

What we change: With those options off the thread ends at once, and what a step gives to it is
dropped.

Remove when: Upstream starts the thread only where routed experts are read, or lets it end.
"""

from types import SimpleNamespace

from patches._patch import Patch, Target

_OPTIONS = (
    "enable_return_routed_experts",
    "enable_expert_balance_debug",
    "enable_expert_distribution_recorder",
)


class _Discard:
    """Stands for the queue that the thread would read."""

    def put(self, item):
        del item


def _is_needed(original) -> bool:
    """Run the thread's function for a worker with the options off. Does it wait for experts?"""
    waits = []
    worker = SimpleNamespace(
        server_args=SimpleNamespace(**dict.fromkeys(_OPTIONS, False)),
        _sync_experts_ids_d2h=lambda: waits.append(True),
    )
    original(worker)
    return bool(waits)


def _replace(original):
    def sync_expert_ids_d2h_thread_func(self):
        # A worker that was taken apart before the thread ran has no attributes.
        args = getattr(self, "server_args", None)
        if any(getattr(args, option, False) for option in _OPTIONS):
            original(self)
        else:
            self.sync_queue = _Discard()

    return sync_expert_ids_d2h_thread_func


PATCH = Patch(
    name="expert_statistics",
    issue="not reported",
    replaced=(
        Target(
            "sgl_jax.srt.managers.tp_worker",
            "ModelWorker._sync_expert_ids_d2h_thread_func",
            _replace,
            ("self",),
        ),
    ),
    probe=_is_needed,
)
