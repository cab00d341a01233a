"""The first engine reads the checkpoint, and the others copy its weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginepool import EnginePool
from enginepool.config import PoolConfig
from enginepool.dispatch.condition import EngineCondition
from enginepool.dispatch.queue import RequestQueue
from enginepool.engine.channel import Channel
from enginepool.engine.gil_limiter import process_limiter
from enginepool.engine.start_stages import StartStages
from enginepool.process.precision import MatmulPrecision
from tests.support import faults
from tests.support.layouts import own_layout, serves, tensors
from tests.support.marks import slow
from tests.support.pools import SMALL, MakePool


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The device for which upstream's loader reads files, each time."""
    from sgl_jax.srt.utils.weight_utils import WeightLoader

    seen: list[Any] = []
    original = WeightLoader.load_weights_from_safetensors

    def load(self: Any, mappings: Any) -> None:
        if len(mappings) > 1:  # several leaves: the real reading, no trial of a shape
            seen.append(self.mesh.devices.flat[0])
        original(self, mappings)

    monkeypatch.setattr(WeightLoader, "load_weights_from_safetensors", load)
    return seen


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"warmup": "none", "tp_size": 2}),
        *slow(
            ("llama", {"warmup": "parallel", "devices": 3}),
            # Stacked experts have their own mesh.
            ("qwen3_moe", {"warmup": "none", "devices": 2, "moe_backend": "epmoe"}),
        ),
    ],
)
def test_once(
    model_dir: Callable[[str], Path], reads: list[Any], family: str, options: dict[str, Any]
) -> None:
    """Every engine gives the reference's answers, with leaves on its own devices only."""
    model = model_dir(family)
    with EnginePool(str(model), **(SMALL | options)) as pool:
        assert reads == jax.devices()[:1]
        serves(pool, model)
        for engine in range(len(pool.engines)):
            leaves = faults.scheduler_of(pool, engine).leaves
            assert {device for leaf in leaves.values() for device in leaf.devices()} == set(
                leaves.devices
            )
        schedulers = [faults.scheduler_of(pool, i) for i in range(len(pool.engines))]
        assert len({type(s.tp_worker.worker.model_runner.model) for s in schedulers}) == 1
        assert [e.server_args.load_format for e in pool.engines] == ["auto"] * len(pool.engines)


def test_leaves_of_another_model(
    make_pool: MakePool, model_dir: Callable[[str], Path], reads: list[Any]
) -> None:
    """The first engine's leaves do not fit, as with models that derive leaves while they load.
    So the checkpoint is read."""
    from enginepool.engine.build import build_engine, dismantle

    source = faults.scheduler_of(make_pool("qwen3", 1), 0).leaves
    args = PoolConfig(str(model_dir("llama")), server_args=SMALL).for_engine("cpu", [1])
    devices = jax.devices()[1:2]
    channel = Channel(1, RequestQueue(), process_limiter(), EngineCondition())
    engine: Any = build_engine(args, devices, channel, MatmulPrecision(), StartStages(), source)
    try:
        assert reads[-1:] == devices
        leaves = engine.scheduler_info["scheduler"].leaves
        for path, value in own_layout(tensors(model_dir("llama"))).items():
            np.testing.assert_array_equal(leaves[path], value)
    finally:
        dismantle(engine)
