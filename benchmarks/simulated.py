"""A simulated accelerator on CPU: a step takes a fixed time within XLA, as if a device computed.

On a TPU the host goes on while the device computes. On CPU the same cores do both, and real steps
hide what an engine costs its host. Here an instruction in the model's forward (`accelerator.cc`)
sleeps, without the GIL and without a core. Dispatch is asynchronous as on a TPU, and a step that is
dispatched early begins when the one before it ends.

    accelerator = simulated.install()   # before an engine is built
    ...                                 # build engines, warm them up
    accelerator.reset(step_seconds=0.01)
    ...                                 # generate
    accelerator.busy_share(engines=1)
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import patches

# Options of an engine for it: four requests at a time, a KV cache that costs the CPU little.
SERVER_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "context_length": 256,
    "max_total_tokens": 1024,
    "max_running_requests": 4,
    "max_prefill_tokens": 64,
    "chunked_prefill_size": 64,
    "precompile_token_paddings": [64],
    "precompile_bs_paddings": [4],
}

_SOURCE = Path(__file__).with_name("accelerator.cc")
_TARGET = "enginepool_simulated_step"


class Accelerator:
    """All devices of this process, counted together.

    Attributes:
        step_seconds: How long the instruction of a step sleeps. 0 before `reset`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.step_seconds = 0.0

    def reset(self, step_seconds: float) -> None:
        """Give steps this time, and count them from now on. Engines must be idle."""
        self.step_seconds = step_seconds
        self._library.accelerator_reset(ctypes.c_int64(round(1e9 * step_seconds)))

    @property
    def steps(self) -> int:
        return self._read()[0]

    def busy_share(self, engines: int) -> float:
        """The share of time in which an engine is busy, on average over this many engines.

        The time is that from the beginning of the first step to the end of the last. A step counts
        with `step_seconds`. If it sleeps longer, the rest counts as idle.
        """
        steps, nanoseconds = self._read()
        return steps * self.step_seconds / (engines * 1e-9 * nanoseconds) if steps else 0.0

    def _read(self) -> tuple[int, int]:
        out = (ctypes.c_int64 * 2)()
        self._library.accelerator_read(out)
        return out[0], out[1]


def install() -> Accelerator:
    """Let every step of engines that are built from now on take time. Call it once in a process.

    Layers and attention of a Qwen3 leave the CPU alone. Every weight and KV buffer stays an
    argument and a result of the step. Ids then mean nothing.

    Raises:
        SystemExit: The host has no C++ compiler, or it fails.
    """
    library = _build()
    capsule = jax.ffi.pycapsule(library.AcceleratorStep)
    jax.ffi.register_ffi_target(_TARGET, capsule, platform="cpu")
    patches.apply([patch for patch in patches.ALL if not patch.optimisation])
    from sgl_jax.srt.layers.logits_processor import LogitsProcessor

    logits_of: Any = LogitsProcessor._get_logits

    @functools.wraps(logits_of)
    def slow(self: Any, *args: Any, **kwargs: Any) -> jax.Array:
        logits = logits_of(self, *args, **kwargs)
        spec = jax.typeof(logits).sharding.spec
        return jax.shard_map(_step, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)(
            logits
        )

    LogitsProcessor._get_logits = slow
    _hollow_out()
    return Accelerator(library)


def _step(operand: jax.Array) -> Any:
    like = jax.ShapeDtypeStruct(operand.shape, operand.dtype)
    return jax.ffi.ffi_call(_TARGET, like)(operand)


def _build() -> ctypes.CDLL:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise SystemExit(
            "the simulated accelerator is a few lines of C++, and this host has no compiler "
            "(c++, g++ or clang++ in PATH): install one, for example with `apt install g++`"
        )
    with tempfile.TemporaryDirectory(prefix="accelerator-") as folder:
        file = Path(folder, "accelerator.so")
        command = [compiler, "-std=c++17", "-O2", "-w", "-shared", "-fPIC"]
        command += [f"-I{jax.ffi.include_dir()}", str(_SOURCE), "-o", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
        return ctypes.CDLL(str(file))  # stays loaded without its file


def _hollow_out() -> None:
    """Have every layer return its input, and read one number of each of its weights."""
    from flax import nnx
    from sgl_jax.srt.models.qwen3 import QWen3DecoderLayer

    def hollow(
        self: Any,
        positions: jax.Array,
        hidden_states: jax.Array,
        forward_batch: Any,
        token_to_kv_pool: Any,
        residual: jax.Array | None = None,
    ) -> tuple[Any, ...]:
        touched = jnp.float32(0)
        # It depends on the step's input: XLA would move a constant out of a loop of steps.
        here = jax.sharding.reshard(hidden_states, PartitionSpec(None, None))[0, 0]
        for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)):
            everywhere = jax.sharding.reshard(leaf, PartitionSpec(*[None] * leaf.ndim))
            touched += here * everywhere[(0,) * leaf.ndim].astype(jnp.float32)
        hidden_states += (0 * touched).astype(hidden_states.dtype)
        kv_buffer = token_to_kv_pool.get_fused_kv_buffer(self.self_attn.attn.layer_id)
        return hidden_states, residual, kv_buffer, []

    QWen3DecoderLayer.__call__ = hollow
