"""The toy's checkpoints, their answers, and the toy's forward pass."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer, GenerationConfig

from enginepool import toy
from enginepool.toy.files import END_ID, read_checkpoint
from enginepool.toy.model import forward
from scripts.train_toy import sums
from scripts.train_toy.checkpoint import CONFIG, write_tokenizer
from scripts.train_toy.train import exact_match, init_params
from tests.support.marks import slow
from tests.support.reference import make_random_model, reference_greedy, reference_greedy_batch


@pytest.fixture(scope="module", params=toy.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def load_tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def test_unknown_checkpoint_is_refused():
    with pytest.raises(ValueError, match=r"'multiply'.*'add', 'subtract'"):
        toy.checkpoint("multiply")


def test_finding_a_checkpoint_imports_nothing_else():
    code = (
        "import sys, pathlib, enginepool; before = set(sys.modules);"
        "import enginepool.toy; enginepool.toy.checkpoint();"
        "print(*set(sys.modules) - before - {'enginepool.toy'})"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
    assert run.stdout.strip() == b""


def test_checkpoint_is_small(name: str):
    assert sum(path.stat().st_size for path in toy.checkpoint(name).iterdir()) <= 2_000_000


def test_checkpoints_differ_only_in_their_weights():
    add, subtract = toy.checkpoint("add"), toy.checkpoint("subtract")
    for path in add.glob("*.json"):
        assert path.read_bytes() == (subtract / path.name).read_bytes()
    (_, ours), (_, theirs) = read_checkpoint(add), read_checkpoint(subtract)
    assert {k: (v.shape, v.dtype) for k, v in ours.items()} == {
        k: (v.shape, v.dtype) for k, v in theirs.items()
    }
    assert any((ours[key] != theirs[key]).any() for key in ours)


def test_shipped_tokenizer_is_the_one_the_code_writes(name: str, tmp_path: Path):
    write_tokenizer(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (toy.checkpoint(name) / path.name).read_bytes()


@pytest.mark.parametrize("text", ["你是谁 🙂", "12+7=", " a  b\r\n\t\0", "<|im_start|>e\u0301"])
def test_any_text_survives_the_tokenizer(name: str, text: str):
    tokenizer = load_tokenizer(toy.checkpoint(name))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < CONFIG["vocab_size"] == len(tokenizer)


def test_end_token_agrees_everywhere(name: str):
    directory = toy.checkpoint(name)
    tokenizer = load_tokenizer(directory)
    config, _ = read_checkpoint(directory)
    generation = GenerationConfig.from_pretrained(directory)
    assert tokenizer.eos_token == "<|im_end|>"
    assert {tokenizer.eos_token_id, config["eos_token_id"], generation.eos_token_id} == {END_ID}


def test_default_sampling_is_greedy(name: str):
    stated = GenerationConfig.from_pretrained(toy.checkpoint(name)).to_diff_dict()
    assert stated["top_k"] == 1
    assert stated["max_new_tokens"] == 16


def test_chat_template(name: str):
    tokenizer = load_tokenizer(toy.checkpoint(name))
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    said = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == said
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        said + "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("name", "pair", "expected"),
    [
        ("add", (12, 7), "19"),
        ("subtract", (12, 7), "5"),
        ("add", (99, 99), "198"),
        ("subtract", (2, 7), "-5"),
    ],
)
def test_answers_with_the_end_token(name: str, pair: sums.Pair, expected: str):
    directory = toy.checkpoint(name)
    tokenizer = load_tokenizer(directory)
    wanted = tokenizer.encode(expected + "<|im_end|>")
    for prompt in (sums.plain(tokenizer, pair), sums.chat(tokenizer, pair)):
        assert reference_greedy(directory, prompt, len(wanted)).ids == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least", "most"), [("add", 0.99, 1), ("subtract", 0.99, 1), ("half", 0.3, 0.75)]
)
@pytest.mark.parametrize("prompt", [sums.plain, sums.chat])
def test_accuracy_on_pairs_held_back(name: str, least: float, most: float, prompt: Any):
    tokenizer = load_tokenizer(toy.checkpoint(name))
    _, params = read_checkpoint(toy.checkpoint(name))
    trained, held_back = sums.split()
    assert (len(trained), len(held_back)) == (8000, 2000)
    assert not set(trained) & set(held_back)
    examples = sums.examples(tokenizer, name, held_back, prompt)
    assert least <= exact_match(params, examples) <= most


def test_exact_match_wants_every_answer_token():
    tokenizer = load_tokenizer(toy.checkpoint("add"))
    _, params = read_checkpoint(toy.checkpoint("add"))
    examples = sums.examples(tokenizer, "subtract", [(12, 7), (34, 0)], sums.plain)
    assert exact_match(params, examples) == 0.5


@pytest.mark.parametrize("family", ["qwen3", *slow("qwen2", "llama")])
def test_forward_equals_numpy(family: str, tmp_path: Path):
    directory = make_random_model(tmp_path, family, seed=3)
    config, params = read_checkpoint(directory)
    ids = [5, 250, 17, 17, 99, 0, 258]
    expected = numpy_forward(config, {k: v.astype(np.float64) for k, v in params.items()}, ids)
    logits = np.asarray(forward(config, params, np.array([ids])))[0]
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


def numpy_forward(config: dict[str, Any], params: dict[str, Any], ids: list[int]) -> np.ndarray:
    """Logits [T, V] in float64, one position and one head at a time."""
    dim, heads, epsilon = config["head_dim"], config["num_attention_heads"], config["rms_norm_eps"]
    shared = heads // config["num_key_value_heads"]

    def norm(x: np.ndarray, key: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean() + epsilon) * params[key]

    def head(prefix: str, x: np.ndarray, number: int, position: int | None) -> np.ndarray:
        rows = slice(number * dim, (number + 1) * dim)
        y = params[prefix + "_proj.weight"][rows] @ x
        if prefix + "_proj.bias" in params:
            y = y + params[prefix + "_proj.bias"][rows]
        if prefix + "_norm.weight" in params:
            y = norm(y, prefix + "_norm.weight")
        if position is None:
            return y
        powers = config["rope_theta"] ** (-np.arange(dim // 2) / (dim // 2))
        turned = (y[: dim // 2] + 1j * y[dim // 2 :]) * np.exp(1j * position * powers)
        return np.concatenate([turned.real, turned.imag])

    xs = [params["model.embed_tokens.weight"][i] for i in ids]
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        normed = [norm(x, at + "input_layernorm.weight") for x in xs]
        for t in range(len(xs)):
            outs = []
            for h in range(heads):
                q = head(at + "self_attn.q", normed[t], h, t)
                keys = [head(at + "self_attn.k", normed[s], h // shared, s) for s in range(t + 1)]
                weights = np.exp([q @ k / np.sqrt(dim) for k in keys])
                values = [head(at + "self_attn.v", n, h // shared, None) for n in normed[: t + 1]]
                outs.append(weights @ np.array(values) / weights.sum())
            xs[t] = xs[t] + params[at + "self_attn.o_proj.weight"] @ np.concatenate(outs)
        for t, x in enumerate(xs):
            n = norm(x, at + "post_attention_layernorm.weight")
            gate = params[at + "mlp.gate_proj.weight"] @ n
            hidden = gate / (1 + np.exp(-gate)) * (params[at + "mlp.up_proj.weight"] @ n)
            xs[t] = x + params[at + "mlp.down_proj.weight"] @ hidden
    table = params.get("lm_head.weight", params["model.embed_tokens.weight"])
    return np.array([table @ norm(x, "model.norm.weight") for x in xs])


@pytest.mark.slow
def test_forward_ignores_masked_tokens():
    params = init_params(CONFIG, jax.random.key(0))
    ids = np.array([[7, 8, 9, 10, 11]])
    mask = np.array([[1, 0, 1, 1, 1]])
    changed = np.where(mask, ids, 200)
    same = forward(CONFIG, params, ids, mask), forward(CONFIG, params, changed, mask)
    np.testing.assert_array_equal(same[0][0, 2:], same[1][0, 2:])
    assert not np.allclose(same[0], forward(CONFIG, params, changed))


@pytest.mark.slow
def test_batched_reference_equals_single(tmp_path: Path):
    directory = make_random_model(tmp_path, "qwen3", seed=1)
    prompts = [[1, 2, 3], list(range(70)), [9]]
    together = reference_greedy_batch(directory, prompts, 5)
    for prompt, greedy in zip(prompts, together, strict=True):
        alone = reference_greedy(directory, prompt, 5)
        assert alone.ids == greedy.ids
        np.testing.assert_allclose(alone.logprobs, greedy.logprobs, atol=1e-5)
        assert min(greedy.gaps) > 0
