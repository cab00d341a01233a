"""What a prefill costs the host, and what the prefix cache evicts."""

from typing import Any

from enginepool import EnginePool
from tests.support import faults
from tests.support.marks import steady_decode
from tests.support.pools import module
from tests.support.steady import counted


def generate(pool: EnginePool, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
    engine: Any = pool.engines[0]
    return engine.generate(input_ids=prompts, sampling_params=params)


@steady_decode
def test_a_prefill_is_one_transfer_and_one_launch(steady_pool: EnginePool) -> None:
    """However many prompts it has, and however long they are."""
    scheduler = faults.scheduler_of(steady_pool, 0)
    step = scheduler.prefill_program
    for prompts in ([[5]], [[1 + i, *range(i)] for i in range(4)]):
        with counted([(scheduler.steady.program.sender, "place"), (step, "launch")]) as counts:
            generate(steady_pool, prompts, 1)
        assert counts[0] == counts[1] == 1


def test_the_prefix_cache_evicts_more_than_it_is_asked_for(steady_pool: EnginePool) -> None:
    """So it evicts less often: each eviction walks over all of its entries."""
    scheduler = faults.scheduler_of(steady_pool, 0)
    total = scheduler.max_total_num_tokens
    generate(steady_pool, [[1 + i, 2, 3] for i in range(total // 64)], 5)
    evictable = scheduler.tree_cache.evictable_size(dp_rank=0)

    def evict() -> None:
        base: Any = module("sgl_jax.srt.mem_cache.base_prefix_cache")
        if hasattr(base, "EvictParams"):
            scheduler.tree_cache.evict(base.EvictParams(num_tokens=1, dp_rank=0))
        else:
            scheduler.tree_cache.evict(1, dp_rank=0)

    steady_pool.runtime.workers[0].channel.run(evict).result()
    evicted = evictable - scheduler.tree_cache.evictable_size(dp_rank=0)
    assert total // 32 <= evicted < evictable
