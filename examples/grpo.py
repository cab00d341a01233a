"""GRPO on the toy: a policy that gets half of its sums right learns the rest from rewards alone.

    pip install -e '.[cpu,examples]'
    python examples/grpo.py --out runs/grpo --minutes 10

Trainer and engines live in one process and on the same devices: plain JAX and optax beside a pool
of engines. Every step samples a group of answers to each prompt, rewards those that are right,
takes a clipped policy-gradient step (several with `--updates`), and gives the engines the new
weights. It checks that every token came from the right version of the weights, and logs how closely
trainer and engines agree on its probability.

With `--async` the engines generate the next step's groups while the trainer works on this step's,
so samples are one step off policy. Weights are replaced under running outputs. Each token has the
version of the weights that it came from.

`--lora RANK` trains an adapter of that rank. The pool generates under it, and its base stays.

`--top-p` samples from fewer ids. With `--masks` the trainer computes probabilities among these ids,
as the sampler did. Without `--masks` it computes them among all ids.

`--out` gets metrics.jsonl (a line per step), plot.png and the checkpoints that `--resume` continues
from.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpo_report
import jax
import numpy as np
import orbax.checkpoint as ocp
from grpo_policy import Adapter, AllWeights
from grpo_trainer import State, Trainer

from enginepool import EnginePool, rl, toy
from enginepool.toy.files import PAD_ID

MAX_PROMPT, MAX_OUTPUT = 8, 8  # tokens
type Pair = tuple[int, int]
type Reward = Callable[[Pair, dict[str, Any]], float]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/grpo"))
    add("--devices", type=int, default=4, help="engines; default: 4")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=350, help="the learning rate falls over these steps")
    add("--minutes", type=float, default=10.0, help="stop after these minutes, even before --steps")
    add("--prompts", type=int, default=64, help="prompts of a step; default: 64")
    add("--samples", type=int, default=8, help="samples of a prompt; default: 8")
    add("--top-p", type=float, default=1.0, help="top-p of the samples")
    add("--masks", action="store_true", help="train on probabilities among the ids of top-p")
    add("--updates", type=int, default=1, help="gradient steps on each step's samples")
    add("--learning-rate", type=float, help="default: 2e-4, with --lora 2e-3")
    add("--evaluate-every", type=int, default=20, help="steps from one to the next; default: 20")
    add("--async", dest="one_step_off", action="store_true", help="generate one step ahead")
    add("--lora", type=int, metavar="RANK", help="train an adapter of this rank alone")
    add("--dtype", default="float32", help="the dtype of the engines")
    add("--int8", action="store_true", help="the engines' matrices are quantized at each update")
    add("--correction", choices=("rollout", "none", "truncated"), default="rollout",
        help="what the loss's ratio compares with: rollout: the samples' probabilities; none: "
        "the trainer's own; truncated: the trainer's own, with importance weights")  # fmt: skip
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    add("--wandb", metavar="PROJECT", help="also log to this project of Weights & Biases")
    return parser.parse_args(argv)


def split() -> tuple[list[Pair], list[Pair]]:
    """Sums to train on, and those that only the evaluation sees."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    order = np.random.default_rng(0).permutation(len(pairs))
    return [pairs[i] for i in order[1000:]], [pairs[i] for i in order[:1000]]


def prompt_ids(pair: Pair) -> list[int]:
    return list(f"{pair[0]}+{pair[1]}=".encode())  # the toy's ids are bytes


def reward(pair: Pair, result: dict[str, Any]) -> float:
    """1 for the sum and an end, else 0."""
    ended = result["meta_info"]["finish_reason"]["type"] == "stop"
    return float(ended and result["text"] == str(pair[0] + pair[1]))


class Rollouts:
    """Groups of samples from the pool, rewarded as they end."""

    def __init__(
        self,
        pool: EnginePool,
        policy: AllWeights,
        options: argparse.Namespace,
        reward: Reward = reward,
    ) -> None:
        self.pool, self.policy, self._options, self._reward = pool, policy, options, reward
        self._pairs, self._held_out = split()

    def collect(self, step: int) -> tuple[rl.RolloutBatch, np.ndarray]:
        """The batch of one step, in the order of its prompts, and its rewards.

        Prompts and samples depend on the seed and the step alone, not on the number of engines.
        """
        options = self._options
        rng = np.random.default_rng([options.seed, step])
        pairs = [self._pairs[i] for i in rng.choice(len(self._pairs), options.prompts, False)]
        prompts = [prompt_ids(pair) for pair in pairs]
        params = {
            "n": options.samples,
            "temperature": 1.0,
            "top_p": options.top_p,
            "max_new_tokens": MAX_OUTPUT,
            "sampling_seed": int(rng.integers(2**31)),
        }
        results: list[Any] = [None] * (options.prompts * options.samples)
        rewards = np.zeros(len(results))
        asked: Any = {"return_logprob": True, "return_sampling_mask": options.masks}
        for result in self.pool.as_completed(
            None, params, input_ids=prompts, **asked, **self.policy.call
        ):
            meta = result["meta_info"]
            place = meta["prompt_index"] * options.samples + meta["sample_index"]
            results[place] = result
            rewards[place] = self._reward(pairs[meta["prompt_index"]], result)
        batch = rl.pad_results(
            results, prompts, pad_id=PAD_ID, max_prompt=MAX_PROMPT, max_output=MAX_OUTPUT
        )
        if batch.sampling_logprobs is not None:
            batch = batch._replace(logprobs=batch.sampling_logprobs)
        return batch, rewards

    def evaluate(self) -> float:
        """The mean reward of greedy answers to the held-out sums."""
        results = self.pool.generate_all(
            None,
            {"temperature": 0, "max_new_tokens": MAX_OUTPUT},
            input_ids=[prompt_ids(pair) for pair in self._held_out],
            **self.policy.call,
        )
        pairs = zip(self._held_out, results, strict=True)
        return float(np.mean([self._reward(pair, result) for pair, result in pairs]))


def check_versions(found: np.ndarray, newest: int, *, lag: int) -> list[int]:
    """The versions of the weights that the tokens came from. None may be older than `lag`
    updates."""
    versions = sorted(set(found.tolist()))
    if versions[0] < newest - lag or versions[-1] > newest:
        raise RuntimeError(f"tokens of versions {versions}, and the trainer is at {newest}")
    return versions


def train(
    rollouts: Rollouts, trainer: Trainer, options: argparse.Namespace, begin: State, first: int
) -> Iterator[tuple[int, State, dict[str, Any]]]:
    """The loop: yields step, state and metrics after each."""
    state, policy = begin, rollouts.policy
    lag = 1 if options.one_step_off else 0
    with ThreadPoolExecutor(1) as ahead:
        pending: Future[Any] | None = None
        for step in range(first, options.steps):
            started = time.perf_counter()
            metrics: dict[str, Any] = {"step": step}
            if step % options.evaluate_every == 0:
                metrics["held_out"] = rollouts.evaluate()
            batch, rewards = pending.result() if pending else rollouts.collect(step)
            if options.one_step_off and step + 1 < options.steps:
                pending = ahead.submit(rollouts.collect, step + 1)
            generated = time.perf_counter()
            found = policy.versions(batch)[batch.output_mask]
            metrics["versions"] = check_versions(found, step, lag=lag)
            metrics["samples"] = hashlib.sha256(batch.output_ids.tobytes()).hexdigest()[:16]
            advantages = rl.group_advantages(rewards, batch.prompt_index, valid=~batch.aborted)
            state, seen = trainer.step(state, batch, advantages)
            jax.block_until_ready(state)  # otherwise its time would count as the update's
            metrics |= seen | {"reward": float(rewards.mean())}
            trained = time.perf_counter()
            mode = "in_place" if options.one_step_off else "drain"
            policy.give(rollouts.pool, state.params, step + 1, mode)
            metrics["seconds"] = {
                "generate": generated - started,
                "train": trained - generated,
                "update": time.perf_counter() - trained,
            }
            yield step, state, metrics


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    folder = (options.out / "checkpoints").absolute()
    if not options.resume and any(one.name.isdecimal() for one in folder.glob("*")):
        raise SystemExit(f"{folder} has checkpoints: give --resume, or another folder as --out")
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    policy = Adapter(options.lora, seed=options.seed) if options.lora else AllWeights()
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(
            EnginePool(
                str(toy.checkpoint("half")),
                devices=options.devices,
                dtype=options.dtype,
                quantization_config_path="int8.yaml" if options.int8 else None,
                context_length=64,
                max_running_requests=max(1, 128 // options.devices),
                **policy.pool_options,
            )
        )
        trainer = Trainer(
            policy, jax.devices()[: options.devices], toy.checkpoint("half"),
            options.learning_rate or policy.learning_rate, options.steps, options.updates,
            options.correction,
        )  # fmt: skip
        checkpoints = stack.enter_context(
            ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2))
        )
        rollouts = Rollouts(pool, policy, options)
        begin, first = trainer.start(), 0
        if options.resume and (latest := checkpoints.latest_step()) is not None:
            begin = checkpoints.restore(latest, args=ocp.args.StandardRestore(begin))
            first = latest
        policy.give(pool, begin.params, first)
        log = stack.enter_context(grpo_report.Log(options, first=first))
        step = first - 1
        for step, state, metrics in train(rollouts, trainer, options, begin, first):
            log.write(metrics | {"minutes": (time.monotonic() - began) / 60})
            over = time.monotonic() - began > 60 * options.minutes
            if over or step + 1 == options.steps or (step + 1) % options.evaluate_every == 0:
                checkpoints.save(step + 1, args=ocp.args.StandardSave(state))
            if over:
                break
        log.write({
            "step": step + 1,
            "held_out": rollouts.evaluate(),
            "minutes": (time.monotonic() - began) / 60,
        })  # fmt: skip
        checkpoints.wait_until_finished()
    grpo_report.plot(options.out)


if __name__ == "__main__":
    main()
