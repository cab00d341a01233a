"""Tunix's GRPO on a pool beside Tunix's own rollouts: what each returns, and seconds a step.

Needs the extra `tunix`. One model, prompts and trainer for all; each in a process of its own, on
virtual CPU devices. The model is the toy with the rotation that Tunix's Qwen3 always has, so its
sums are wrong and its end tokens are not.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.table import CORES, plain
from enginepool import toy
from enginepool.toy.files import END_ID

VANILLA, SGLANG_JAX, POOL = "VanillaRollout", "SglangJaxRollout", "EnginePoolRollout"
_PROMPTS, _SAMPLES, _TOKENS = 8, 8, 12
_WARMUP = 2  # steps that compile
_TEMPERATURE = 0.7
_SERVER_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "context_length": 128,
    "max_running_requests": 64,
    "max_total_tokens": 8192,
    "chunked_prefill_size": 1024,
    "precompile_token_paddings": [1024],
    "precompile_bs_paddings": [64],
}
_HEADERS = ("rollout", "engines", "end tokens kept", "log-probabilities", "get_per_token_logps")
_HEADERS += ("step s", "sampling s", "sync s", "× first row")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tunix_rollouts")
    parser.description = __doc__
    add = parser.add_argument
    add("--steps", type=int, default=10, help=f"the first {_WARMUP} are not counted; default: 10")
    add("--json", metavar="FILE", help="write all figures there")
    add("--one", nargs=3, metavar=("ROLLOUT", "ENGINES", "MODEL"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.one:
        rollout, engines, model = args.one
        print(json.dumps(_run(rollout, int(engines), Path(model), args.steps)))
        return
    with tempfile.TemporaryDirectory(prefix="tunix-rollouts-") as folder:
        model = _write_model(Path(folder))
        cases = ((VANILLA, 1), (SGLANG_JAX, 1), (POOL, 1), (POOL, 2))
        rows = [_process(*case, model, args.steps) for case in cases]
    print(
        f"{_PROMPTS} prompts, {_SAMPLES} samples each, at most {_TOKENS} tokens; float32, CPU, "
        f"{CORES} cores; medians of {args.steps - _WARMUP} steps"
    )
    plain(_HEADERS, (_line(row, rows[0]) for row in rows))
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2), encoding="utf-8")


def _write_model(folder: Path) -> Path:
    model = Path(shutil.copytree(toy.checkpoint("half"), folder / "model"))
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"rope_theta": 1_000_000})
    (model / "config.json").write_text(text, encoding="utf-8")
    return model


def _process(rollout: str, engines: int, model: Path, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.tunix_rollouts", "--steps", str(steps)]
    command += ["--one", rollout, str(engines), str(model)]
    flags = f"--xla_force_host_platform_device_count={engines}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{rollout} ended with {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _run(name: str, engines: int, model: Path, steps: int) -> dict[str, Any]:
    """Train, and ask once more at the end: then engines and trainer have the same weights."""
    from tunix.rl.grpo.grpo_learner import (  # pyright: ignore[reportMissingImports]
        GRPOConfig,
        GRPOLearner,
    )

    cluster = _cluster(name, engines, model, steps)
    sampling = _timed(cluster.rollout, "generate")
    syncing = _timed(cluster, "sync_weights")
    starts: list[float] = []

    def batches() -> Iterator[dict[str, np.ndarray]]:
        for step in range(steps):
            starts.append(time.perf_counter())
            prompts = [f"{step + 10}+{number + 20}=" for number in range(_PROMPTS)]
            yield {"prompts": np.array(prompts)}
        starts.append(time.perf_counter())

    def reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        return [float(text[:1].isdigit()) + len(text) / 100 for text in completions]

    config = GRPOConfig(num_generations=_SAMPLES, beta=0.0)
    GRPOLearner(cluster, config, reward).train(batches())
    row = _answers(cluster) | {
        "rollout": name,
        "engines": engines,
        "step_sec": statistics.median(np.diff(starts)[_WARMUP:]),
        "sampling_sec": statistics.median(sampling[_WARMUP:steps]),
        "sync_sec": statistics.median(syncing[_WARMUP:] or [0.0]),
    }
    if name == POOL:
        cluster.rollout.pool.close()
    return row


def dimensions(directory: Path, tied: str = "use_tied_embedding") -> dict[str, Any]:
    """A checkpoint's, as Tunix's `ModelConfig` names them; `tied` is its family's own name."""
    given = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return {
        "num_layers": given["num_hidden_layers"],
        "vocab_size": given["vocab_size"],
        "embed_dim": given["hidden_size"],
        "hidden_dim": given["intermediate_size"],
        "num_heads": given["num_attention_heads"],
        "head_dim": given["head_dim"],
        "num_kv_heads": given["num_key_value_heads"],
        "norm_eps": given["rms_norm_eps"],
        "rope_theta": given["rope_theta"],
        tied: given["tie_word_embeddings"],
    }


def _cluster(name: str, engines: int, directory: Path, steps: int) -> Any:
    import jax
    import optax
    from transformers import AutoTokenizer
    from tunix.models.qwen3 import model, params  # pyright: ignore[reportMissingImports]
    from tunix.rl import rl_cluster  # pyright: ignore[reportMissingImports]
    from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports]
        RolloutConfig,
    )

    from enginepool.tunix import EnginePoolRollout

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    config = model.ModelConfig(**dimensions(directory))
    args = _SERVER_ARGS | {"devices": engines, "model": str(directory)}
    rollouts: dict[str, Any] = {
        VANILLA: "vanilla",
        SGLANG_JAX: "sglang_jax",
        POOL: functools.partial(EnginePoolRollout, pool_args=args),
    }
    actor = params.create_model_from_safe_tensors(str(directory), config, mesh, jax.numpy.float32)
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    return rl_cluster.RLCluster(
        actor=actor,
        tokenizer=AutoTokenizer.from_pretrained(str(directory)),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine=rollouts[name],
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-5), eval_every_n_steps=10**6, max_steps=steps
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=_TOKENS,
                max_prompt_length=32,
                kv_cache_size=64,
                temperature=_TEMPERATURE,
                return_logprobs=True,
                rollout_sglang_jax_model_version=str(directory),
                rollout_sglang_jax_log_level="error",
                rollout_sglang_jax_kwargs=_SERVER_ARGS,
            ),
        ),
    )


def _timed(owner: Any, method: str) -> list[float]:
    """Have an object note how long each call of a method takes."""
    original: Callable[..., Any] = getattr(owner, method)
    seconds: list[float] = []

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - started)

    setattr(owner, method, timed)
    return seconds


def _answers(cluster: Any) -> dict[str, Any]:
    """What the rollout returns, against Tunix's own forward pass."""
    from flax import nnx
    from tunix.rl import common  # pyright: ignore[reportMissingImports]

    rollout, pad_id = cluster.rollout, cluster.rollout.pad_id()
    prompts = [f"{number}+{number}=" for number in range(10, 74)]
    output = cluster.generate(prompts)
    tokens = np.full((len(prompts), _TOKENS), pad_id, np.int32)
    for padded, ids in zip(tokens, output.tokens, strict=True):
        padded[: len(ids)] = ids
    ended = [len(ids) < _TOKENS or ids[-1] == END_ID for ids in output.tokens]
    kept = [END_ID in ids for ids in output.tokens]
    graph, state = nnx.split(cluster.actor_trainer.model)
    forward = functools.partial(
        common.compute_per_token_logps,
        graph,
        state,
        output.left_padded_prompt_tokens,
        tokens,
        pad_id=pad_id,
        eos_id=rollout.eos_id(),
    )
    row: dict[str, Any] = {"ended": sum(ended), "kept": sum(kept), "logprobs": None}
    if output.logprobs is not None:
        expected = np.asarray(forward(temperature=_TEMPERATURE))
        row["logprobs"] = max(
            float(np.abs(theirs[: len(values)] - values).max())
            for theirs, values in zip(expected, output.logprobs, strict=True)
        )
    try:
        values = rollout.get_per_token_logps(output.left_padded_prompt_tokens, tokens)
        row["logps"] = float(np.abs(values - forward())[tokens != pad_id].max())
    except Exception as error:  # whatever a rollout raises is what it answers
        row["logps"] = type(error).__name__
    return row


def _line(row: dict[str, Any], first: dict[str, Any]) -> tuple[Any, ...]:
    logprobs, logps = row["logprobs"], row["logps"]
    return (
        row["rollout"],
        row["engines"],
        f"{row['kept']} of {row['ended']}",
        "none" if logprobs is None else f"within {logprobs:.0e}",
        logps if isinstance(logps, str) else f"within {logps:.0e}",
        f"{row['step_sec']:.3f}",
        f"{row['sampling_sec']:.3f}",
        f"{row['sync_sec']:.3f}",
        f"{row['step_sec'] / first['step_sec']:.2f}",
    )


if __name__ == "__main__":
    main()
