"""Train the toy's checkpoints: ``python -m scripts.train_toy.train``; or ``--evaluate`` them.

A few minutes on two CPU cores.  It prints exact match on the 2,000 held-out pairs: the share of
greedy outputs whose answer and end token are right, with weights rounded to bfloat16.
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from transformers import AutoTokenizer

from enginepool.toy import NAMES, checkpoint
from enginepool.toy.files import read_checkpoint
from enginepool.toy.model import Config, forward
from scripts.train_toy import sums
from scripts.train_toy.checkpoint import CONFIG, parameter_shapes, write_checkpoint, write_tokenizer

STEPS, WARMUP_STEPS, DECAY_STEPS = 1200, 100, 500
# "half" also adds. Its training ends before the learning rate decays, so it gets about half of the
# sums right.
ENDS = {"half": STEPS - DECAY_STEPS}
PLAIN_BATCH, CHAT_BATCH = 224, 32
PEAK_RATE = 2e-3
BETA2, WEIGHT_DECAY = 0.98, 0.1

Params = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the toy's checkpoints.")
    parser.add_argument("--out", type=Path, default=checkpoint().parent)
    parser.add_argument("--op", choices=(*NAMES, "all"), default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", action="store_true", help="evaluate what is in --out instead")
    arguments = parser.parse_args()
    if arguments.op == "subtract" and not (arguments.out / "add").is_dir():
        parser.error(f"training of subtract begins with add, which {arguments.out} does not have")
    for op in NAMES if arguments.op == "all" else (arguments.op,):
        started = time.monotonic()
        tokenizer = load_tokenizer()
        if arguments.evaluate:
            _, params = read_checkpoint(arguments.out / op)
        else:
            params = rounded(train(tokenizer, op, arguments.seed, start(op, arguments)))
            write_checkpoint(arguments.out / op, params)
        plain, chat = evaluate(tokenizer, op, params)
        seconds = time.monotonic() - started
        print(f"{op}: plain {plain:.2%}, chat {chat:.2%}, {seconds:.0f} s", flush=True)


def start(op: str, arguments: argparse.Namespace) -> Params:
    """The weights that training begins with.

    "subtract" begins with the weights of "add", which already reads prompts and ends answers. That
    takes fewer steps than random weights, and gets more of the held-out pairs right.
    """
    if op != "subtract":
        return init_params(CONFIG, jax.random.key(arguments.seed))
    _, stored = read_checkpoint(arguments.out / "add")
    return {name: jnp.asarray(value, jnp.float32) for name, value in stored.items()}


def init_params(config: Config, key: jax.Array) -> dict[str, jax.Array]:
    """Float32 parameters to start training from.

    Norms are one, biases are zero, and matrices are normal. Matrices that write to the residual
    stream are scaled down by the depth.
    """
    params = {}
    shapes = parameter_shapes(config)
    keys = jax.random.split(key, len(shapes))
    depth = 2 * config["num_hidden_layers"]
    for (name, shape), name_key in zip(shapes.items(), keys, strict=True):
        if name.endswith("norm.weight"):
            params[name] = jnp.ones(shape)
        elif name.endswith(".bias"):
            params[name] = jnp.zeros(shape)
        else:
            scale = shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale *= depth**-0.5
            params[name] = scale * jax.random.normal(name_key, shape)
    return params


def load_tokenizer() -> Any:
    """The toy's tokenizer, as transformers reads it from files."""
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory))
        return AutoTokenizer.from_pretrained(directory)


def train(tokenizer: Any, op: str, seed: int, params: Params) -> Params:
    """Train float32 `params`, whose arrays are donated, on the pairs that are not held out.

    Every step sees plain and chat prompts. If they are trained one after the other, the model
    forgets the first kind.
    """
    pairs, _ = sums.split()
    plain = sums.examples(tokenizer, op, pairs, sums.plain)
    chat = sums.examples(tokenizer, op, pairs, sums.chat)
    weights = sums.sampling_weights(op, pairs)
    rng = np.random.default_rng(seed)
    state = OPTIMIZER.init(params)
    for number in range(ENDS.get(op, STEPS)):
        rows = rng.choice(len(pairs), PLAIN_BATCH + CHAT_BATCH, p=weights)
        batches = [_take(plain, rows[:PLAIN_BATCH]), _take(chat, rows[PLAIN_BATCH:])]
        params, state, loss = step(params, state, batches)
        if (number + 1) % 100 == 0:
            print(f"{op}: step {number + 1}, loss {loss:.4f}", flush=True)
    return params


def rate(count: Any) -> jax.Array:
    """The learning rate of a step; `count` is how many there were before."""
    warmup = jnp.minimum(1.0, (count + 1.0) / WARMUP_STEPS)
    return PEAK_RATE * warmup * jnp.minimum(1.0, (STEPS - count) / DECAY_STEPS)


def is_matrix(params: Params) -> Params:
    """Whether weight decay applies to a parameter. It does not apply to the scales of norms."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


OPTIMIZER = optax.adamw(rate, b2=BETA2, weight_decay=WEIGHT_DECAY, mask=is_matrix)


@partial(jax.jit, donate_argnums=(0, 1))
def step(
    params: Params, state: optax.OptState, batches: list[sums.Examples]
) -> tuple[Any, optax.OptState, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(params, batches)
    changes, state = OPTIMIZER.update(gradients, state, params)
    return cast(Params, optax.apply_updates(params, changes)), state, loss


def loss_of(params: Params, batches: list[sums.Examples]) -> jax.Array:
    """Mean cross entropy of the answers' tokens. Every batch has the same weight."""
    losses = []
    for ids, is_answer in batches:
        log_probs = jax.nn.log_softmax(forward(CONFIG, params, ids[:, :-1]))
        chosen = jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1)[..., 0]
        losses.append(-jnp.sum(chosen * is_answer[:, 1:]) / jnp.sum(is_answer))
    return jnp.mean(jnp.stack(losses))


def rounded(params: Params) -> dict[str, np.ndarray]:
    """The weights as they will be stored."""
    return {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in params.items()}


def evaluate(tokenizer: Any, op: str, params: Params) -> tuple[float, float]:
    """Exact match on the held-out pairs: with plain prompts, and through the chat template."""
    _, pairs = sums.split()
    plain = sums.examples(tokenizer, op, pairs, sums.plain)
    chat = sums.examples(tokenizer, op, pairs, sums.chat)
    return exact_match(params, plain), exact_match(params, chat)


def exact_match(params: Params, examples: sums.Examples) -> float:
    """Share of the examples that greedy decoding answers exactly, end token included.

    One pass is enough: greedy decoding gives the whole answer if and only if, after the prompt
    and each prefix of the answer, the likeliest token is the answer's next one.
    """
    ids, is_answer = examples
    likeliest = np.asarray(_likeliest(params, ids[:, :-1]))
    right = (likeliest == ids[:, 1:]) | ~is_answer[:, 1:]
    return float(right.all(axis=1).mean())


@jax.jit
def _likeliest(params: Params, ids: jax.Array) -> jax.Array:
    return jnp.argmax(forward(CONFIG, params, ids), axis=-1)


def _take(examples: sums.Examples, rows: np.ndarray) -> sums.Examples:
    return sums.Examples(examples.ids[rows], examples.is_answer[rows])


if __name__ == "__main__":
    main()
