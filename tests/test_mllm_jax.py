"""The rollout backend of MLLM-JAX, by the calls of its runner."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool, NoWeights
from enginepool.mllm_jax import EnginePoolRolloutBackend
from enginepool.toy.files import read_checkpoint
from tests.support.forced import NEAR_TIE, output_logits
from tests.support.layouts import own_layout
from tests.support.pools import SMALL
from tests.support.reference import make_random_model

SYSTEM = "Add."
GREEDY = {"temperature": 0, "ignore_eos": True}


def linen(model: Path) -> dict[str, Any]:
    """A checkpoint as the trainer's parameter tree of flax.linen, as MLLM-JAX makes it."""
    tree: dict[str, Any] = {}
    for path, value in own_layout(read_checkpoint(model)[1]).items():
        keys = path.replace("layers.", "layers_").replace("_proj.weight", "_proj.kernel").split(".")
        node = tree
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = np.array(value)
    return tree


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_random_model(tmp_path_factory.mktemp("v"), "qwen3", seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def backend(versions: list[Path]) -> Iterator[EnginePoolRolloutBackend]:
    pool = EnginePool(str(versions[0]), devices=2, **SMALL)
    backend = EnginePoolRolloutBackend(pool, sampling_params=GREEDY)
    backend.initialize()
    yield backend
    backend.shutdown()
    backend.shutdown()
    assert pool.closed


def rollout(backend: EnginePoolRolloutBackend, prompts: list[str], params: Any) -> Any:
    return backend.rollout(
        prompts=prompts,
        params=params,
        system_prompt=SYSTEM,
        global_length=64,
        max_length_sample=6,
    )


def assert_answers(model: Path, result: Any, count: int) -> None:
    """Rows are prompt, output and padding. Outputs are this model's best."""
    batch = result.batch
    assert sorted(batch) == ["attention_mask", "input_ids", "labels"]
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
    assert len({array.shape for array in batch.values()}) == 1
    assert len(result.chat_prompts) == len(result.answers) == len(batch["labels"]) == count
    prompts, outputs = [], []
    for row in range(count):
        ids, mask, labels = (batch[n][row] for n in ("input_ids", "attention_mask", "labels"))
        parts = [(m, n, len(list(g))) for (m, n), g in groupby(zip(mask, labels, strict=True))]
        assert [(int(m), int(n)) for m, n, _ in parts] == [(1, 0), (1, 1), (0, 0)]
        prompt, output = parts[0][2], parts[1][2]
        assert output == 6
        assert set(ids[prompt + output :].tolist()) <= {int(ids[-1])}
        prompts.append(ids[:prompt].tolist())
        outputs.append(ids[prompt : prompt + output].tolist())
    for rows, output in zip(output_logits(model, prompts, outputs), outputs, strict=True):
        behind = rows.max(axis=-1) - rows[np.arange(len(output)), output]
        assert behind.max() < NEAR_TIE


def test_a_trainers_loop(backend: EnginePoolRolloutBackend, versions: list[Path]) -> None:
    """Sync, roll out, flush, release, train. The next rollout uses the next weights."""
    prompts = ["1+1=", "20+22="] * 3
    for step in (1, 0, 1):
        params = linen(versions[step])
        backend.sync_weights(params)
        result = rollout(backend, prompts, params)
        backend.flush_cache()
        backend.release_weights()
        assert_answers(versions[step], result, 6)
        assert result.answers[0::2] == [result.answers[0]] * 3
        assert "20+22=" in result.chat_prompts[1]
        assert SYSTEM in result.chat_prompts[1]
    with pytest.raises(NoWeights):
        rollout(backend, prompts, None)


def test_without_the_hooks(backend: EnginePoolRolloutBackend, versions: list[Path]) -> None:
    """A rollout uses its own weights, whether they were synced before or not. They are sent to
    the engines once."""
    params = linen(versions[0])
    assert_answers(versions[0], rollout(backend, ["1+1="], params), 1)
    version = backend.pool.stats()["weight_version"]
    assert_answers(versions[0], rollout(backend, ["2+3="] * 2, params), 2)
    assert backend.pool.stats()["weight_version"] == version
    assert_answers(versions[1], rollout(backend, ["1+1="], linen(versions[1])), 1)
    assert backend.pool.stats()["weight_version"] == version + 1


def test_widths(backend: EnginePoolRolloutBackend, versions: list[Path]) -> None:
    """They are constant for short prompts. A longer prompt makes them wider."""
    backend.sync_weights(linen(versions[0]))
    short = rollout(backend, ["1", "2+2="], None).batch["input_ids"]
    assert short.shape == (2, 64 + 6)
    long = rollout(backend, ["1", "9" * 100], None)
    longest = max(long.batch["attention_mask"].sum(axis=1))
    assert long.batch["input_ids"].shape == (2, longest)
    assert longest > 100 + 6
    assert rollout(backend, [], None).batch["input_ids"].shape == (0, 70)
