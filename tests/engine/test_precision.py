"""An engine's matrix products have one precision, whatever the host sets now and later."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from enginepool import EnginePool
from enginepool.engine.executable_cache import ExecutableCache
from enginepool.process.precision import MatmulPrecision
from tests.support import faults
from tests.support.layouts import tensors
from tests.support.pools import SMALL, open_with

# Shapes that no other test has, because compiled programs are not lowered again.
SIZES = SMALL | {"max_total_tokens": 1088}
NAME = "jax_default_matmul_precision"
Lowered = Callable[[], set[str]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture
def lowered(tmp_path: Path) -> Iterator[Lowered]:
    """The precisions of all matrix products that JAX has compiled so far."""
    jax.config.update("jax_dump_ir_to", str(tmp_path))
    yield lambda: {
        precision
        for program in tmp_path.glob("*.mlir")
        for line in program.read_text(encoding="utf-8").splitlines()
        if "stablehlo.dot_general" in line
        for precision in re.findall(r"precision = \[(\w+),", line) or ["DEFAULT"]
    }
    jax.config.update("jax_dump_ir_to", "")


@pytest.fixture
def model(model_dir: Callable[[str], Path]) -> Path:
    return model_dir("qwen3")


@contextmanager
def set_by_the_host(value: str) -> Iterator[None]:
    jax.config.update(NAME, value)
    try:
        yield
    finally:
        jax.config.update(NAME, None)


def use_everything(pool: EnginePool, model: Path) -> None:
    """Prefill, steady decode, scores and a swap."""
    pool.generate_all(["a", "b" * 20], GREEDY, return_logprob=True)
    pool.generate_all(["c"], GREEDY | {"temperature": 1.0}, return_prompt_logprob=True)
    pool.update_weights(tensors(model))
    pool.generate_all(["d" * 70], GREEDY)


def a_gpus_choice(monkeypatch: pytest.MonkeyPatch, seen: list[Any]) -> None:
    """Upstream sets a precision, as on a GPU. Another thread reads its own meanwhile."""
    from sgl_jax.srt.model_executor.model_runner import ModelRunner

    initialize = ModelRunner.initialize

    def asking(runner: Any, *args: Any, **kwargs: Any) -> None:
        jax.config.update(NAME, "highest")
        look = threading.Thread(target=lambda: seen.append(getattr(jax.config, NAME)))
        look.start()
        look.join()
        initialize(runner, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "initialize", asking)


def test_the_host_may_name_jaxs_arguments_while_an_engine_is_built() -> None:
    with MatmulPrecision().building():
        jax.config.update(name="jax_log_compiles", val=jax.config.jax_log_compiles)


def test_upstreams_choice_is_the_engines_alone(
    monkeypatch: pytest.MonkeyPatch, lowered: Lowered, model: Path
) -> None:
    seen: list[Any] = []
    a_gpus_choice(monkeypatch, seen)
    with EnginePool(str(model), devices=1, **SIZES) as pool:
        assert seen == [None]
        assert getattr(jax.config, NAME) is None
        use_everything(pool, model)
        faults.delete_kv_cache(pool, 0)
        use_everything(pool, model)
        assert pool.stats()["engines"][0]["matmul_precision"] == "highest"
        assert lowered() == {"HIGHEST"}
    ones = jnp.ones((3, 3))
    assert "HIGHEST" not in jax.jit(lambda x: x @ x).lower(ones).as_text()


def test_the_users_choice_comes_before_upstreams(
    monkeypatch: pytest.MonkeyPatch, lowered: Lowered, model: Path
) -> None:
    a_gpus_choice(monkeypatch, [])
    with set_by_the_host("high"):
        pool = EnginePool(str(model), devices=1, warmup="none", **SIZES).open()
    with pool:
        pool.generate_all(["a"], GREEDY | {"max_new_tokens": 1})
        assert pool.stats()["engines"][0]["matmul_precision"] == "high"
        assert lowered() == {"HIGH"}


def test_later_settings_of_the_host_do_not_reach_engines(
    monkeypatch: pytest.MonkeyPatch, one_cache: ExecutableCache, lowered: Lowered, model: Path
) -> None:
    open_with(monkeypatch, ExecutableCache(one_cache.serialized))  # nothing is lowered yet
    pool = EnginePool(str(model), devices=1, warmup="none", **SMALL)
    with pool, set_by_the_host("highest"):
        use_everything(pool, model)
        assert pool.stats()["engines"][0]["matmul_precision"] == "default"
        assert lowered() == {"DEFAULT"}
