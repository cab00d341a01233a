"""Python blocks of README.md and docs/ that need a package which few environments have.

Names that a test does not have are replaced: models of a hub, accelerators, tasks.
"""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool, toy
from tests.support.pages import PAGES, blocks, run
from tests.support.pools import SMALL
from tests.support.xla import QUICK_TO_COMPILE


def run_needing(package: str, names: dict[str, Any], instead: dict[str, str]) -> None:
    """Run all blocks that need the package. There must be at least one."""
    pytest.importorskip(package)
    found = [(page, block) for page in PAGES for block in blocks(page, "python")]
    needing = [(page, block) for page, block in found if block.needs == package]
    assert needing
    for page, block in needing:
        there = {printed: used for printed, used in instead.items() if printed in block.code}
        run(page, block, names, there)


def test_lm_eval(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.task import ConfigurableTask

    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"question": "12+7=", "choices": ["20", "19"], "answer": 1}))
    task = ConfigurableTask(
        config={
            "task": "sums",
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(data)},
                "cache_dir": str(tmp_path / "cache"),
            },
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "target_delimiter": "",
        }
    )
    with EnginePool(devices=2, **SMALL) as pool:
        names = {"pool": pool, "task": task}
        run_needing("lm_eval", names, {'["arc_easy"]': "[task]"})
    assert names["results"]["results"]["sums"]["acc,none"] == 1.0


def test_tunix() -> None:
    """A cluster's configuration has the pool as its rollout."""
    pytest.importorskip("tunix")
    import jax
    import optax
    from tunix.rl.rl_cluster import RLTrainingConfig, Role

    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",))
    training = RLTrainingConfig(actor_optimizer=optax.adam(1e-3), eval_every_n_steps=1, max_steps=1)
    names: dict[str, Any] = {
        "role_to_mesh": dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh),
        "training_config": training,
    }
    run_needing("tunix", names, {})
    made = names["cluster_config"].rollout_engine
    assert made.func is names["EnginePoolRollout"]


def test_ray() -> None:
    ray = pytest.importorskip("ray")
    handler = signal.getsignal(signal.SIGTERM)
    names: dict[str, Any] = {"prompts": ["12+7=", "30+4="]}
    checkpoint = repr(str(toy.checkpoint()))
    instead = {
        '"Qwen/Qwen3-4B"': checkpoint,
        '"/mnt/checkpoints/step-1200"': checkpoint,
        "hosts=4": "hosts=1",
        "devices_per_host=4": "devices_per_host=2",
        '{"TPU": 4}': '{"CPU": 1}',
        '"JAX_PLATFORMS": "tpu"': '"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "' + QUICK_TO_COMPILE + '"',
    }
    try:
        run_needing("ray", names, instead)
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)
    assert len(names["outputs"]) == 16
