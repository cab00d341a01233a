"""The persistent compilation cache stays as the host set it.

What breaks: With JAX_COMPILATION_CACHE_DIR set, an engine on a device above 0 switches JAX's
persistent compilation cache off for the whole process, also for the host's trainer. An engine on
device 0 switches it on again and lowers its thresholds.

Why: libtpu crashes when it runs a cached program on devices without device 0
(https://github.com/jax-ml/jax/issues/38004). So `Scheduler._setup_jit_cache` changes jax.config,
which belongs to the process.

What we change: `_setup_jit_cache` changes nothing. JAX reads that variable by itself. On TPU a
compilation for devices without the host's first neither reads nor writes the cache, on any thread.
JAX's thread-local configuration does not help: JAX decides once for the process whether the cache
is used and where it is. On a JAX without the private function that this needs, upstream's method
stays, and the cache that it switches off stays off.

Remove when: libtpu is fixed, or upstream leaves jax.config alone.
"""

import builtins
import logging
from types import SimpleNamespace

from patches._lookup import with_globals
from patches._patch import Patch, Target

# Platforms whose cached programs crash on devices that do not include the first.
AFFECTED_PLATFORMS = frozenset({"tpu"})

logger = logging.getLogger(__name__)


def _is_needed(setup_jit_cache, _) -> bool:
    """Run upstream's method for device 1 with stand-ins for the process's configuration."""
    changes = []
    stand_in = with_globals(
        setup_jit_cache,
        os=SimpleNamespace(getenv=lambda name, default=None: "a folder", environ={}),
        jax=SimpleNamespace(
            config=SimpleNamespace(
                update=lambda name, value: changes.append(name),
                jax_persistent_cache_min_compile_time_secs=0,
            )
        ),
        __builtins__={**vars(builtins), "__import__": _import_stand_in},
    )
    stand_in(None, SimpleNamespace(device_indexes=[1]))
    return bool(changes)


def _import_stand_in(name, *args):
    """Return a stand-in for JAX's compilation_cache module, which upstream imports and resets."""
    nothing = SimpleNamespace(reset_cache=lambda: None, set_cache_dir=lambda path: None)
    return SimpleNamespace(compilation_cache=nothing)


def _replace_setup(original):
    def setup_jit_cache(self, server_args):
        # The original is not called. It only changes the process's configuration.
        logger.debug("XLA persistent compilation cache: left as the process has it")

    return setup_jit_cache


def _replace_cache_key(original):
    def get_cache_key(options, backend, computation, devices, override_fdo_profile=None):
        if backend.platform in AFFECTED_PLATFORMS and not _include_first(backend, devices):
            return None  # "Do not use the cache", as the original says it.
        return original(options, backend, computation, devices, override_fdo_profile)

    return get_cache_key


def _include_first(backend, devices) -> bool:
    host = [device.id for device in backend.local_devices()]
    if not host:  # compiled ahead of time for chips that are not here
        return True
    return any(device.id == min(host) for device in devices.flat)


PATCH = Patch(
    name="compile_cache",
    issue="https://github.com/sgl-project/sglang-jax/issues/1216",
    replaced=(
        Target(
            "sgl_jax.srt.managers.scheduler",
            "Scheduler._setup_jit_cache",
            _replace_setup,
            ("self", "server_args"),
            # 0.0.3rc99 sets the thresholds in the constructor and never switches the cache off.
            optional=True,
        ),
        Target(
            "jax._src.compiler",
            "_get_cache_key",
            _replace_cache_key,
            ("options", "backend", "computation", "devices", "override_fdo_profile"),
        ),
    ),
    probe=_is_needed,
)
