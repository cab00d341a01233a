"""Engines on upstream's FlashAttention backend, in Pallas' TPU interpreter on CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import scheduler_of
from enginepool import EnginePool
from tests.support.interpreter import flash_attention
from tests.support.pools import SMALL
from tests.support.reference import make_random_model

OpenFlash = Callable[..., Any]


@pytest.fixture(scope="module")
def open_flash() -> Iterator[OpenFlash]:
    """`with open_flash(model, devices=1, page_size=16, **options) as pool`."""

    @contextmanager
    def open_pool(model: Path, devices: int = 1, **options: Any) -> Iterator[EnginePool]:
        settings = SMALL | {"attention_backend": "fa", "page_size": 16} | options
        with EnginePool(str(model), devices=devices, **settings) as pool:
            for engine in range(devices):
                runner = scheduler_of(pool, engine).tp_worker.worker.model_runner
                assert type(runner.attn_backend).__name__ == "FlashAttention"
            yield pool

    with flash_attention():
        yield open_pool


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two weight sets of one shape; two queries share a key, as in the models that people run."""
    return [
        make_random_model(tmp_path_factory.mktemp("flash"), "qwen3", seed, num_heads=4)
        for seed in (1, 2)
    ]
