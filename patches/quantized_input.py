"""A quantized matrix takes an input of any sharding.

What breaks: With native attention, which CPU and GPU have, a quantized model cannot be traced: the
attention's output is not sharded, and the output projection wants it sharded over its rows.

Why: `QuantizedLinear` runs in a `shard_map`, which takes its input only in the sharding of the
weight's rows, even on one device. A matrix that is not quantized takes any.

What we change: The input is resharded first. That does nothing where it has the sharding already.

Remove when: `QuantizedLinear` reshards its input, or all attention backends shard their output.
"""

from types import SimpleNamespace

import numpy as np

from patches._lookup import module
from patches._patch import Patch, Target

_MODULE = "sgl_jax.srt.layers.linear"


def _is_needed(original) -> bool:
    """Trace a matrix of one device with an input that is not sharded. This starts no backend."""
    jax = module("jax")
    sharding = jax.sharding
    mesh = sharding.AbstractMesh(
        (1, 1), ("data", "tensor"), axis_types=(sharding.AxisType.Explicit,) * 2
    )

    def spec(shape, dtype, *axes):
        placed = sharding.NamedSharding(mesh, sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

    def call(x, weight, scale):
        matrix = SimpleNamespace(
            weight_q=SimpleNamespace(value=weight),
            weight_scale=SimpleNamespace(value=scale),
            **dict.fromkeys(("activation_dtype", "bias", "compute_dtype", "weight_block_size")),
            output_scatter_dimension=None,  # of an older version
            **dict.fromkeys(("allow_narrow_n_blockwise", "skip_bias_add"), False),
            kernel_axes=("tensor", None),
            mesh=mesh,
            name="matrix",
        )
        return original(matrix, x)[0]

    try:
        with sharding.use_abstract_mesh(mesh):
            jax.eval_shape(
                call,
                spec((2, 8), np.float32, "data", None),
                spec((4, 8), np.int8, None, "tensor"),
                spec((4,), np.float32, None),
            )
    except ValueError:
        return True
    return False


def _replace(original):
    from jax.sharding import NamedSharding, PartitionSpec, reshard

    def __call__(self, x, *args, **kwargs):
        axes = "data", *(None,) * (x.ndim - 2), self.kernel_axes[0]
        given = reshard(x, NamedSharding(self.mesh, PartitionSpec(*axes)))
        return original(self, given, *args, **kwargs)

    return __call__


PATCH = Patch(
    name="quantized_input",
    issue="not reported",
    # Versions differ in the parameters after `x`, which are passed on.
    replaced=(Target(_MODULE, "QuantizedLinear.__call__", _replace),),
    probe=_is_needed,
)
