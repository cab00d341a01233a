"""prime-rl's client of `/inference/v1/generate`: turns of token ids, with their probabilities.

Skipped where renderers is not installed; it works with openai below 3.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginepool import EnginePool, toy
from tests.support.forced import LOGPROB_TOLERANCE
from tests.support.pools import SMALL
from tests.support.scores import chosen, reference
from tests.support.servers import Running, serving

pytest.importorskip("renderers")
MODEL = toy.checkpoint()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with EnginePool(str(MODEL), devices=1, **SMALL) as pool, serving(pool) as running:
        yield running


def test_turns(running: Running) -> None:
    """A conversation by its template, then a turn whose prompt is the ids of the one before."""
    from renderers.client import generate
    from renderers.default import DefaultRenderer
    from transformers import AutoTokenizer

    with running.http() as http:
        (card,) = http.get("/v1/models").json()["data"]
        said: Any = http.post(
            "/tokenize", json={"messages": [{"role": "user", "content": "12+7="}]}
        ).json()
    renderer: Any = DefaultRenderer(AutoTokenizer.from_pretrained(MODEL))

    async def turns() -> list[dict[str, Any]]:
        import openai

        async with openai.AsyncOpenAI(base_url=f"{running.url()}/v1", api_key="none") as client:

            async def turn(prompt_ids: list[int] | None, **more: Any) -> dict[str, Any]:
                return await generate(
                    client=client,
                    renderer=renderer,
                    messages=[{"role": "user", "content": "12+7="}],
                    model=card["id"],
                    prompt_ids=prompt_ids,
                    sampling_params={"temperature": 1.0, "max_tokens": 8, "seed": 1, **more},
                    cache_salt="step-1",
                    priority=0,
                )

            first = await turn(None)
            # The fields that verifiers adds to a turn that continues the ids of the one before.
            added = {"routed_experts_prompt_start": 1}
            ids = [*first["prompt_ids"], *first["completion_ids"], 10]
            return [first, await turn(ids, **added)]

    made = asyncio.run(turns())
    assert made[0]["prompt_ids"] == said["tokens"]
    assert made[0]["content"] == "19"
    for turn in made:
        prompt, ids = turn["prompt_ids"], turn["completion_ids"]
        (rows,) = reference(Path(MODEL), [prompt], [ids])
        values = np.array(turn["completion_logprobs"])
        assert np.abs(chosen(rows, ids) - values).max() < LOGPROB_TOLERANCE
    known = len(made[0]["prompt_ids"]) + len(made[0]["completion_ids"]) - 1
    assert made[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == known
