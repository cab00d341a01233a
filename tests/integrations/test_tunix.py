"""Tunix trains on a pool, with its own learners, models, mappings and forward pass.

Skipped where Tunix is not installed; `make test-integrations` has an environment for it.
"""

import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from enginepool import EnginePool, InvalidConfig, InvalidRequest, InvalidWeights
from enginepool.toy.files import END_ID, PAD_ID
from tests.support.faults import raise_in_step
from tests.support.layouts import devices_only, on_host
from tests.support.liveness import callers, until
from tests.support.marks import slow
from tests.support.pools import SMALL

pytest.importorskip("tunix")

import qwix
from flax import nnx
from tunix.rl.agentic import agentic_grpo_learner
from tunix.rl.agentic.parser.chat_template_parser.parser import QwenChatTemplateParser
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from enginepool.tunix import EnginePoolRollout
from enginepool.tunix.parameters import ParameterMapping, mapping_config, merge_lora
from tests.support.tunix import (
    Model,
    Watched,
    assert_outputs,
    assert_scores,
    hugging_face,
    load,
    make_checkpoint,
    make_cluster,
    many_letters,
    mesh_of,
    tokenizer_of,
)

CONFIG = RolloutConfig(
    max_tokens_to_generate=8,
    max_prompt_length=48,
    temperature=0.7,
    return_logprobs=True,
)
LORA = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": ["all"]}
PROMPTS = ["1+1=", "20+22=", "A longer one: 3+4=", "5"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def make(family: str = "qwen3", seed: int = 1) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(family), family, seed)

    return make


@pytest.fixture(scope="module")
def pool_of(checkpoint: Callable[..., Path]) -> Iterator[Callable[..., EnginePool]]:
    """Two engines with weights other than the actor's."""
    pools: dict[tuple[str, bool], EnginePool] = {}

    def open_pool(family: str = "qwen3", *, lora: bool = False) -> EnginePool:
        if (family, lora) not in pools:
            options = LORA if lora else {}
            model = str(checkpoint(family, 2))
            pools[family, lora] = EnginePool(model, devices=2, **options, **SMALL)
        return pools[family, lora]

    yield open_pool
    for pool in pools.values():
        pool.close()


@pytest.fixture
def make(checkpoint: Callable[..., Path], pool_of: Callable[..., EnginePool]) -> Callable[..., Any]:
    """A rollout over a shared pool, and its actor."""

    def build(
        family: str = "qwen3", mesh: Any = None, config: RolloutConfig = CONFIG, actor: Any = None
    ) -> tuple[Watched, nnx.Module]:
        mesh = mesh or mesh_of(2)
        actor = actor or load(checkpoint(family), family, mesh)
        tokenizer = tokenizer_of(checkpoint(family))
        return Watched(actor, tokenizer, mesh, config, pool=pool_of(family)), actor

    return build


def assert_synced(pool: EnginePool, actor: nnx.Module) -> None:
    """Every engine has exactly these weights."""
    assert pool.checksum()  # an error if the engines differ
    tensors = hugging_face(actor)
    assert len(tensors) > 20
    for name, tensor in tensors.items():
        rows = np.array(pool.get_weights_by_name(name, truncate_size=1000), np.float32)
        np.testing.assert_array_equal(rows, tensor, err_msg=name)


def prompts_of(steps: int, batch: int = 4) -> list[dict[str, np.ndarray]]:
    return [{"prompts": np.array([f"{step}+{n}=" for n in range(batch)])} for step in range(steps)]


def with_lora(model: nnx.Module, seed: int = 0, **options: Any) -> nnx.Module:
    """Adapters that change outputs. Those that qwix makes do not."""
    provider = qwix.LoraProvider(module_path=".*(_proj)", rank=4, alpha=8.0, **options)
    adapted = qwix.apply_lora_to_model(
        model, provider, **model.get_model_input(), rngs=nnx.Rngs(seed)
    )
    keys = iter(jax.random.split(jax.random.key(seed), 1000))
    state = jax.tree.map(
        lambda x: 0.1 * jax.random.normal(next(keys), x.shape), nnx.state(adapted, nnx.LoRAParam)
    )
    nnx.update(adapted, state)
    return adapted


@pytest.mark.parametrize("num_iterations", [1, 2])
def test_grpo(checkpoint: Callable[..., Path], num_iterations: int) -> None:
    """Steps of Tunix's own learner on a pool that its cluster makes. Every sample and score is
    of the weights that the trainer had when it asked, and Tunix's own figures agree."""
    mesh = mesh_of(2)
    actor, reference = (load(checkpoint(), "qwen3", mesh) for _ in range(2))
    engine = partial(Watched, pool_args={"model": str(checkpoint(seed=2)), **SMALL})
    cluster = make_cluster(
        actor,
        mesh,
        tokenizer_of(checkpoint()),
        engine,
        CONFIG,
        reference=reference,
        steps=4 * num_iterations,
    )
    rollout = cluster.rollout
    assert len(rollout.pool.engines) == 2
    with rollout.pool:
        config = GRPOConfig(num_generations=4, num_iterations=num_iterations, beta=0.01)
        GRPOLearner(cluster, config, many_letters).train(prompts_of(4))
        assert len(rollout.outputs) == 4
        assert len(rollout.models) == 5  # the first is before anything was trained
        assert assert_outputs(rollout) > 4 * 4 * 4
        assert len(rollout.scores) == (4 if num_iterations > 1 else 0)
        assert (assert_scores(rollout) > 0) == (num_iterations > 1)
        assert_synced(rollout.pool, cluster.actor_trainer.model)
        assert cluster.global_steps == 4
    before, after = rollout.models[0], rollout.models[-1]
    tokens = np.arange(10, 20)[None]
    assert np.abs(before.logps(tokens, tokens) - after.logps(tokens, tokens)).max() > 0.01


def test_agents(checkpoint: Callable[..., Path], pool_of: Callable[..., EnginePool]) -> None:
    """The agentic learner: each sample is a call of its own, eight at once. With a seed, the
    samples of a group still differ."""
    mesh = mesh_of(2)
    tokenizer = tokenizer_of(checkpoint())
    cluster = make_cluster(
        load(checkpoint(), "qwen3", mesh),
        mesh,
        tokenizer,
        partial(Watched, pool=pool_of()),
        RolloutConfig(
            max_tokens_to_generate=8,
            max_prompt_length=96,
            temperature=1.0,
            return_logprobs=True,
            seed=jax.random.PRNGKey(7),
        ),
        steps=3,
    )
    learner = agentic_grpo_learner.GRPOLearner(
        cluster,
        agentic_grpo_learner.GRPOConfig(
            num_generations=4, max_response_length=8, max_concurrency=8, beta=0.0
        ),
        reward_fns=many_letters,
        chat_parser=QwenChatTemplateParser(tokenizer),
    )
    learner.train(prompts_of(3))
    outputs = cluster.rollout.outputs
    assert len(outputs) == 3 * 4 * 4
    assert cluster.rollout.most_at_once > 1
    assert assert_outputs(cluster.rollout) > len(outputs)
    groups: dict[bytes, set[bytes]] = {}
    for _, output, _ in outputs:
        group = groups.setdefault(output.left_padded_prompt_tokens.tobytes(), set())
        group.add(output.tokens[0].tobytes())
    assert len(groups) == 12
    assert all(len(group) == 4 for group in groups.values())
    assert_synced(pool_of(), cluster.actor_trainer.model)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_sync(make: Callable[..., Any], family: str) -> None:
    """A sharded actor's parameters reach the engines and never the host."""
    rollout, actor = make(family, mesh_of(2, 2))
    params = nnx.state(actor, nnx.Param)
    with (
        devices_only(),
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        rollout.update_params(params, (nnx.Param,))
    flat = {str(path): leaf.get_value() for path, leaf in nnx.to_flat_state(params)}
    assert on_host(flat) == []
    assert_synced(rollout.pool, actor)
    rng = np.random.default_rng(0)
    prompts = np.full((6, 40), PAD_ID, np.int32)
    completions = np.full((6, 12), PAD_ID, np.int32)
    for row in range(6):
        prompts[row, -(row * 7 + 1) :] = rng.integers(0, 256, row * 7 + 1)
        completions[row, : 2 * row + 1] = rng.integers(0, 256, 2 * row + 1)
    values = rollout.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(completions))
    assert isinstance(values, jax.Array)
    assert assert_scores(rollout) == (completions != PAD_ID).sum()


def test_scores_where_end_tokens_are_the_padding(
    checkpoint: Callable[..., Path], pool_of: Callable[..., EnginePool]
) -> None:
    """As in Llama 3. The first end token behind a completion is one of its tokens."""
    mesh, tokenizer = mesh_of(2), tokenizer_of(checkpoint())
    tokenizer.pad_token = tokenizer.eos_token
    end, actor = tokenizer.eos_token_id, load(checkpoint(), "qwen3", mesh)
    rollout = EnginePoolRollout(actor, tokenizer, mesh, CONFIG, pool=pool_of())
    completions = np.array([[50, 51, end, end], [50, 51, 52, 53], [end] * 4])
    prompts = np.array([[end, 40]] * 3)
    values = rollout.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(completions))
    wanted = [[50, 51, end], [50, 51, 52, 53], [end]]
    scores: Any = pool_of().score(input_ids=[[40]] * 3, continuation_ids=wanted)
    for row, score in zip(values, scores, strict=True):
        expected = [*score["logprobs"], 0.0, 0.0, 0.0][: len(row)]
        assert row.tolist() == pytest.approx(expected, abs=1e-5)


def test_lora(make: Callable[..., Any], checkpoint: Callable[..., Path]) -> None:
    """Tunix syncs the adapters only. Engines get the weights that adapters and base make."""
    mesh = mesh_of(2)
    base = load(checkpoint(), "qwen3", mesh)
    adapted = with_lora(base)
    config = RolloutConfig(
        max_tokens_to_generate=8,
        max_prompt_length=48,
        temperature=1.0,
        return_logprobs=True,
        rollout_sglang_jax_lora_scaling=2.0,
    )
    rollout, _ = make(mesh=mesh, config=config, actor=adapted)
    cluster = make_cluster(
        adapted,
        mesh,
        tokenizer_of(checkpoint()),
        partial(Watched, pool=rollout.pool),
        config,
        steps=3,
    )
    GRPOLearner(cluster, GRPOConfig(num_generations=4, beta=0.0), many_letters).train(prompts_of(3))
    assert assert_outputs(cluster.rollout) > 0
    last = cluster.rollout.models[-1]
    assert cluster.rollout.models[0] is not last
    tokens = np.arange(30, 40)[None]
    values = cluster.rollout.get_per_token_logps(tokens, tokens)
    assert np.abs(values - last.logps(tokens, tokens)).max() < 1e-4
    assert np.abs(values - Model(base).logps(tokens, tokens)).max() > 0.01


@pytest.mark.parametrize("family", ["qwen3", *slow("qwen2", "llama")])
def test_lora_as_an_adapter(
    family: str, checkpoint: Callable[..., Path], pool_of: Callable[..., EnginePool]
) -> None:
    """The base is synced once, and the adapter at each of Tunix's syncs. Samples and scores are
    of both."""
    mesh, pool = mesh_of(2), pool_of(family, lora=True)
    base = load(checkpoint(family), family, mesh)
    config = RolloutConfig(
        max_tokens_to_generate=8,
        max_prompt_length=48,
        temperature=1.0,
        return_logprobs=True,
        rollout_sglang_jax_lora_scaling=2.0,
    )
    cluster = make_cluster(
        with_lora(base),
        mesh,
        tokenizer_of(checkpoint(family)),
        partial(Watched, pool=pool, lora_name="policy"),
        config,
        steps=3,
    )
    GRPOLearner(cluster, GRPOConfig(num_generations=4, beta=0.0), many_letters).train(prompts_of(3))
    assert assert_outputs(cluster.rollout) > 0
    last = cluster.rollout.models[-1]
    tokens = np.arange(30, 40)[None]
    values = cluster.rollout.get_per_token_logps(tokens, tokens)
    assert np.abs(values - last.logps(tokens, tokens)).max() < 1e-4
    first = cluster.rollout.models[0].logps(tokens, tokens)
    assert np.abs(values - first).max() > 1e-3
    (score,) = pool.score(input_ids=[tokens[0].tolist()], continuation_ids=[tokens[0].tolist()])
    assert np.abs(score["logprobs"] - Model(base).logps(tokens, tokens)).max() < 1e-4
    assert pool.stats()["weight_version"] == 1
    assert len(cluster.rollout.models) == 4


@pytest.mark.parametrize(
    ("more", "taken"),
    [
        ({}, True),
        ({"to_hf_transpose_keys": {"w": (1, 2, 0)}}, True),  # outputs before inputs
        ({"to_hf_transpose_keys": {"w": (0, 2, 1)}}, False),  # heads inside
        ({"to_hf_hook_fns": {"w": jnp.sin}}, False),
    ],
)
def test_lora_whose_mapping_reorders(more: dict[str, Any], taken: bool) -> None:
    """It reorders a layer's inputs or outputs. The adapter then does not have the engine's
    order."""
    names = {"layers.*.q.w": ("model.layers.*.self_attn.q_proj.weight", ())}
    mapping = ParameterMapping(mapping_config(nnx.Module(), {"to_hf_mappings": names, **more}), {})
    a, b = jnp.arange(4.0).reshape(4, 1), jnp.arange(6.0).reshape(1, 2, 3)
    if not taken:
        with pytest.raises(InvalidWeights, match="leave lora_name out"):
            mapping.adapter({"layers.0.q.w": (a, b)})
        return
    found = mapping.adapter({"layers.0.q.w": (a, b)})
    layer = "model.layers.0.self_attn.q_proj"
    assert found[f"{layer}.lora_A.weight"].tolist() == [[0, 1, 2, 3]]
    assert found[f"{layer}.lora_B.weight"].tolist() == [[0], [1], [2], [3], [4], [5]]


def test_lora_without_its_scale(make: Callable[..., Any], checkpoint: Callable[..., Path]) -> None:
    rollout, _ = make(actor=with_lora(load(checkpoint(), "qwen3", mesh_of(2))))
    with pytest.raises(InvalidConfig, match="rollout_sglang_jax_lora_scaling"):
        rollout.generate(PROMPTS, CONFIG)


def test_lora_on_a_quantised_base(
    make: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    config = RolloutConfig(rollout_sglang_jax_lora_scaling=2.0)
    actor = with_lora(load(checkpoint(), "qwen3", mesh_of(2)), weight_qtype="int8")
    rollout, _ = make(config=config, actor=actor)
    with pytest.raises(InvalidWeights, match="quantised base"):
        rollout.update_params(nnx.state(actor, nnx.LoRAParam), (nnx.LoRAParam,))


def test_lora_in_another_order() -> None:
    """Heads come before the input, as in Gemma. The pool does not guess and refuses."""
    shapes = {"q.w": (2, 8, 4), "q.w_lora_a": (8, 1), "q.w_lora_b": (1, 2, 4)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(InvalidWeights, match="only adapters of input by rank"):
        merge_lora(params, 1.0)


def test_outputs(make: Callable[..., Any]) -> None:
    """The end token is an output's last, with its log-probability, and it is not in the text.
    Prompts have a constant width unless one is longer."""
    rollout, _ = make()
    with pytest.raises(InvalidRequest, match="prompts is empty"):
        rollout.generate([], CONFIG)
    rollout.generate(PROMPTS, RolloutConfig(max_tokens_to_generate=8, temperature=0))
    greedy = rollout.outputs.pop()[1]
    assert greedy.logprobs is None
    assert greedy.left_padded_prompt_tokens.shape == (4, 64)
    third = [tokens[2] for tokens in greedy.tokens]
    ends = RolloutConfig(
        max_tokens_to_generate=8,
        max_prompt_length=8,
        temperature=0,
        top_p=None,
        eos_tokens=[int(token) for token in third],
        return_logprobs=True,
    )
    output = rollout.generate(PROMPTS, ends)
    for row, tokens in enumerate(output.tokens):
        expected = greedy.tokens[row].tolist()
        end = next(index for index, token in enumerate(expected) if token in third)
        assert tokens.tolist() == expected[: end + 1]
        assert output.text[row] == rollout.pool.front_end().tokenizer.decode(expected[:end])
    assert assert_outputs(rollout) == sum(map(len, output.tokens))
    assert output.left_padded_prompt_tokens.shape == (4, 32)
    for row, text in zip(output.left_padded_prompt_tokens, PROMPTS, strict=True):
        ids = list(text.encode())
        assert row.tolist() == [PAD_ID] * (32 - len(ids)) + ids
    assert (rollout.pad_id(), rollout.eos_id(), rollout.model()) == (PAD_ID, END_ID, None)


def test_sampling_masks(
    checkpoint: Callable[..., Path], pool_of: Callable[..., EnginePool]
) -> None:
    """With the option, the rollout returns the ids that each token was sampled from."""
    mesh = mesh_of(2)
    rollout = EnginePoolRollout(
        load(checkpoint(), "qwen3", mesh), tokenizer_of(checkpoint()), mesh, CONFIG,
        pool=pool_of(), return_sampling_mask=True,
    )  # fmt: skip
    config = RolloutConfig(max_tokens_to_generate=8, temperature=1.0, top_k=3, top_p=None)
    output: Any = rollout.generate(PROMPTS, config)
    for tokens, mask, values in zip(
        output.tokens, output.sampling_masks, output.sampling_logprobs, strict=True
    ):
        rows = np.split(np.array(mask["ids"]), mask["indptr"][1:-1])
        assert [len(row) for row in rows] == [3] * len(tokens)
        assert all(token in row for token, row in zip(tokens, rows, strict=True))
        assert len(values) == len(tokens)


def test_routed_experts(
    checkpoint: Callable[..., Path], pool_of: Callable[..., EnginePool]
) -> None:
    """The rollout gets them from the pool, which must record them."""
    mesh = mesh_of(2)
    rollout = EnginePoolRollout(
        load(checkpoint(), "qwen3", mesh), tokenizer_of(checkpoint()), mesh, CONFIG,
        pool=pool_of(), return_routed_experts=True,
    )  # fmt: skip
    with pytest.raises(InvalidRequest, match="enable_return_routed_experts=True"):
        rollout.generate(PROMPTS, CONFIG)


def test_seeds(make: Callable[..., Any]) -> None:
    """With one seed, calls of a run differ, also simultaneous ones. The same run gives the same
    samples again."""

    def config(seed: Any) -> RolloutConfig:
        return RolloutConfig(max_tokens_to_generate=8, temperature=1.0, seed=seed)

    def run(seed: Any) -> list[list[int]]:
        rollout, _ = make()
        calls = [rollout.generate(["1+1="] * 2, config(seed)) for _ in range(2)]
        return [tokens.tolist() for call in calls for tokens in call.tokens]

    samples = run(3)
    assert len({tuple(tokens) for tokens in samples}) == 4
    assert run(jnp.asarray(3)) == samples != run(jax.random.key(3))
    rollout, _ = make()
    with callers(8) as executor:
        calls = [executor.submit(rollout.generate, "1+1=", config(3)) for _ in range(8)]
        assert len({tuple(call.result().tokens[0].tolist()) for call in calls}) == 8


def test_a_pool_whose_first_engine_is_out(checkpoint: Callable[..., Path]) -> None:
    options = {"model": str(checkpoint(seed=2)), "devices": 2, "warmup": "none", "restart": False}
    with EnginePool(**options, **SMALL) as pool:
        first, mesh = pool.engines[0], mesh_of(2)
        raise_in_step(pool, 0)
        first.generate(input_ids=[5])
        until(lambda: "scheduler" not in first.scheduler_info)
        actor = load(checkpoint(), "qwen3", mesh)
        rollout = Watched(actor, tokenizer_of(checkpoint()), mesh, CONFIG, pool=pool)
        rollout.generate(PROMPTS, CONFIG)
        assert assert_outputs(rollout) > 0


def test_weights_that_were_restored(
    make: Callable[..., Any], checkpoint: Callable[..., Path]
) -> None:
    """Weights that Tunix puts into the actor after it made the rollout are used."""
    rollout, actor = make()
    restored = load(checkpoint(seed=3), "qwen3", mesh_of(2))
    nnx.update(actor, nnx.state(restored))
    rollout.generate(PROMPTS, CONFIG)
    assert_synced(rollout.pool, restored)


def test_names_of_hugging_face(make: Callable[..., Any]) -> None:
    """The caller's mapping, in Tunix's form, gives Hugging Face's names and shapes."""
    names = {
        "embedder.input_embedding": "model.embed_tokens.weight",
        "last.w": "model.norm.weight",
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        names[f"layers.*.{norm}.w"] = f"model.layers.*.{norm}.weight"
    for part in ("q_norm", "k_norm", "q_proj", "k_proj", "v_proj", "o_proj"):
        names[f"layers.*.attn.{part}.w"] = f"model.layers.*.self_attn.{part}.weight"
    for part in ("gate", "up", "down"):
        names[f"layers.*.mlp.{part}_proj.kernel"] = f"model.layers.*.mlp.{part}_proj.weight"

    def renamed(state: nnx.State) -> nnx.State:
        flat = dict(state.flat_state())
        flat["last", "w"] = flat.pop(("final_norm", "w"))
        return nnx.State.from_flat_path(flat)

    mapping: dict[str, Any] = {
        "preprocess_src_state": renamed,
        "to_hf_mappings": {name: (target, ()) for name, target in names.items()},
        "to_hf_transpose_keys": {"kernel": (1, 0), "layers.*.attn.o_proj.w": (2, 0, 1)},
        "to_hf_hook_fns": {
            "layers.*.attn.o_proj.w": lambda w: w.reshape(len(w), -1),
            **{f"layers.*.attn.{n}_proj.w": lambda w: w.reshape(len(w), -1).T for n in "qkv"},
        },
    }
    rollout, actor = make(config=RolloutConfig(rollout_mapping_config=mapping))
    rollout.update_params(nnx.state(actor, nnx.Param))
    assert_synced(rollout.pool, actor)
    del mapping["to_hf_mappings"]["last.w"]
    rollout, actor = make(config=RolloutConfig(rollout_mapping_config=mapping))
    with pytest.raises(InvalidWeights, match=r"last\.w") as error:
        rollout.update_params(nnx.state(actor, nnx.Param))
    assert error.value.names == ("last.w",)


def test_refusals(checkpoint: Callable[..., Path], make: Callable[..., Any]) -> None:
    class Unknown(nnx.Module):
        pass

    threads = threading.enumerate()
    pool_args = {"model": str(checkpoint()), **SMALL}
    tokenizer = tokenizer_of(checkpoint())
    with pytest.raises(InvalidConfig, match="Unknown to sglang-jax"):
        EnginePoolRollout(Unknown(), tokenizer, mesh_of(2), CONFIG, pool_args=pool_args)
    assert threading.enumerate() == threads  # a refused configuration opens no pool
    for given in ({}, {"pool": make()[0].pool, "pool_args": {}}):
        with pytest.raises(InvalidConfig, match="either"):
            EnginePoolRollout(Unknown(), tokenizer, mesh_of(2), CONFIG, **given)
