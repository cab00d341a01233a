"""A model's size by upstream itself: its model classes and its model runner's arithmetic.

Imports sgl_jax inside functions only, because patches must come first where pools are tested.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from enginepool.sizing.memory import Memory
from enginepool.sizing.shape import Shape


def upstreams_leaves(config: Any, tp_size: int, dtype: Any) -> dict[str, Any]:
    """The leaves of upstream's model of this configuration by path, without their arrays."""
    from sgl_jax.srt.models.registry import ModelRegistry

    config.ep_size, config.moe_backend = 1, "epmoe"
    # As upstream's ModelConfig.configure_for_tensor_parallel changes it.
    heads = _kv_heads_on_chip(config.num_key_value_heads, tp_size)
    config.num_key_value_heads = heads * tp_size
    devices = np.array(jax.devices()[:tp_size]).reshape(1, tp_size)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    made, _ = ModelRegistry.resolve_model_cls(config.architectures)
    with jax.set_mesh(mesh):
        model = nnx.eval_shape(lambda: made(config, mesh=mesh, dtype=dtype))
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}


def on_chip(path: str, leaf: Any, tp_size: int) -> int:
    """Bytes on a chip. A head is sharded when it is loaded, by its WeightMapping."""
    spec = () if leaf.sharding is None else tuple(leaf.sharding.spec)
    cut = "tensor" in spec or path == "lm_head.embedding"
    return leaf.size * leaf.dtype.itemsize // (tp_size if cut else 1)


def upstreams_runner(shape: Shape, memory: Memory) -> Any:
    """Upstream's model runner, with the attributes that its own KV arithmetic reads."""
    from sgl_jax.srt.model_executor.model_runner import ModelRunner

    class Runner(ModelRunner):
        attention_tp_size = memory.settings.tp_size
        embedding_pool_bytes = 0
        linear_recurrent_config = None

        def __init__(self) -> None:
            self.model_config = SimpleNamespace(
                head_dim=shape.head_dim,
                hf_config=object(),
                get_num_kv_heads=lambda tp: _kv_heads_on_chip(shape.kv_heads, tp),
            )
            self.kv_cache_dtype = jnp.dtype(shape.dtype)
            self.use_mla_backend = False
            self.mem_fraction_static = memory.settings.fraction
            self.server_args = SimpleNamespace(page_size=memory.settings.page_size)

        def adjust_layer_num(self) -> int:
            return shape.layers

        _kv_pool_layer_count = adjust_layer_num

        def get_available_device_memory(self) -> int:
            return memory.free - memory.weights

    return Runner()


def _kv_heads_on_chip(heads: int, tp_size: int) -> int:
    from sgl_jax.srt.utils.jax_utils import get_num_kv_heads_by_tp

    return get_num_kv_heads_by_tp(heads, tp_size)
