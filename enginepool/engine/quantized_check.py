"""Checks that a model's quantized matrices accept the output of its attention.

Reaches into upstream's models: the layers' `self_attn.o_proj`, and its `QuantizedLinear`.

What breaks: A pool of a quantized model on CPU or GPU opens without warm-up, and every request is
aborted.
Why: A quantized matrix wants its input sharded over the devices of an engine, even over one. Native
attention does not shard its output.
Remove when: Native attention shards its output, or a quantized matrix takes any sharding. The check
tries the matrix itself, so one that works passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from enginepool.errors import InvalidConfig
from enginepool.values import shown

if TYPE_CHECKING:
    from sgl_jax.srt.model_executor.model_runner import ModelRunner
    from sgl_jax.srt.server_args import ServerArgs


def check_quantized(runner: ModelRunner, server_args: ServerArgs) -> None:
    """Trace the first layer's output projection of an engine with native attention.

    Raises:
        InvalidConfig: It does not take what this attention gives.
    """
    from sgl_jax.srt.layers import linear
    from sgl_jax.srt.layers.attention.native_backend import NativeAttention

    quantized = getattr(linear, "QuantizedLinear", ())
    try:
        model: Any = runner.model
        matrix = model.model.layers[0].self_attn.o_proj
    except (AttributeError, IndexError):  # a model of other parts
        return
    if not isinstance(runner.attn_backend, NativeAttention) or not isinstance(matrix, quantized):
        return
    # One row for each of the engine's devices; `weight_q` is stored (out, in).
    whole = NamedSharding(runner.mesh, PartitionSpec("data", None))
    shape = (runner.mesh.size, matrix.weight_q.get_value().shape[1])
    given = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
    try:
        with jax.set_mesh(runner.mesh):
            jax.eval_shape(lambda x: matrix(x)[0], given)
    except ValueError as error:
        path = server_args.quantization_config_path
        field = "quantization_config" + (f"_path={shown(path)}" if path else " of config.json")
        raise InvalidConfig(
            f"{field}: native attention, which CPU and GPU have, does not work with quantized "
            "matrices of this sglang-jax; open the pool on weights that are not quantized"
        ) from error
