"""Adapters on the TPU's attention kernel, interpreted."""

from pathlib import Path

from tests.integrations.conftest import GREEDY, OpenFlash, ids
from tests.support.adapters import agrees, config, merged, random_adapter
from tests.support.pools import compilations
from tests.support.reference import make_random_model, reference_greedy_batch

LORA = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["all"]}
PROMPTS = [ids(n) for n in (20, 3, 66, 16)]  # one of them in two pieces
TOKENS = 8


def test_mixed_batch_and_a_hot_update(open_flash: OpenFlash, tmp_path: Path) -> None:
    """Every row uses its own adapter's weights, and nothing is compiled."""
    model = make_random_model(tmp_path / "model", "qwen3", 1, num_layers=1, num_heads=4)
    arrays = [random_adapter(model, seed) for seed in range(3)]
    weights = [merged(tmp_path / str(n), model, one, 2.0) for n, one in enumerate(arrays)]
    params = GREEDY | {"max_new_tokens": TOKENS}
    with open_flash(model, **LORA) as pool, compilations() as compiled:
        pool.load_lora_adapter("a", arrays[0], config_dict=config(4))
        pool.load_lora_adapter("b", arrays[1], config_dict=config(4))
        asked = {"input_ids": PROMPTS, "return_logprob": True, "lora_path": ["a", None, "b", "a"]}
        first = pool.generate_all(None, params, **asked)
        pool.load_lora_adapter("a", arrays[2])
        second = pool.generate_all(None, params, **asked)
        assert not compiled
    for results, a in ((first, weights[0]), (second, weights[2])):
        for prompt, where, result in zip(PROMPTS, [a, model, weights[1], a], results, strict=True):
            assert agrees(result, reference_greedy_batch(where, [prompt], TOKENS)[0])
