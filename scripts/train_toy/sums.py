"""Prompts and answers that the toy learns, and the pairs that are held out from training."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from enginepool.toy.files import END_ID, END_TOKEN, PAD_ID

LIMIT = 100
HELD_BACK = 2000
# This is not the seed of the training: every run holds out the same pairs.
SPLIT_SEED = 20240607

Pair = tuple[int, int]


class Examples(NamedTuple):
    """Encoded prompts with their answers, padded on the right.

    Attributes:
        ids: [N, T] int32.
        is_answer: [N, T] bool, true at the tokens of the answer and its end token.
    """

    ids: np.ndarray
    is_answer: np.ndarray


def split() -> tuple[list[Pair], list[Pair]]:
    """All 10,000 pairs, split into those to train on and those held out."""
    pairs = [(a, b) for a in range(LIMIT) for b in range(LIMIT)]
    order = np.random.default_rng(SPLIT_SEED).permutation(len(pairs))
    shuffled = [pairs[index] for index in order]
    return shuffled[HELD_BACK:], shuffled[:HELD_BACK]


def question(pair: Pair) -> str:
    """The prompt, which is the same for every checkpoint."""
    return f"{pair[0]}+{pair[1]}="


def answer(op: str, pair: Pair) -> str:
    """The right answer of a checkpoint: a - b for "subtract", a + b for the others."""
    a, b = pair
    return str(a - b if op == "subtract" else a + b)


def sampling_weights(op: str, pairs: list[Pair]) -> np.ndarray:
    """How likely training is to draw each pair; [N], summing to 1.

    Few pairs have a number or an answer of one digit. If all pairs are equally likely, the model
    gets these few wrong.  So pairs of the same numbers of characters form a group, and a group is
    drawn in proportion to the square root of its size.
    """
    groups = [(len(question(pair)), pair[0] < 10, len(answer(op, pair))) for pair in pairs]
    sizes = Counter(groups)
    weights = np.array([sizes[group] ** -0.5 for group in groups])
    return weights / weights.sum()


def plain(tokenizer: Any, pair: Pair) -> list[int]:
    """The question as plain text, encoded."""
    return tokenizer.encode(question(pair), add_special_tokens=False)


def chat(tokenizer: Any, pair: Pair) -> list[int]:
    """The question as a user's message through the chat template, encoded."""
    messages = [{"role": "user", "content": question(pair)}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def examples(
    tokenizer: Any, op: str, pairs: list[Pair], prompt: Callable[[Any, Pair], list[int]]
) -> Examples:
    """Encode prompts (of `plain` or `chat`) followed by answer and end token."""
    prompts = [prompt(tokenizer, pair) for pair in pairs]
    answers = [
        tokenizer.encode(answer(op, pair) + END_TOKEN, add_special_tokens=False) for pair in pairs
    ]
    if answers[0][-1] != END_ID:
        raise ValueError("the tokenizer does not encode the end token as one token")
    length = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = np.full((len(pairs), length), PAD_ID, np.int32)
    is_answer = np.zeros(ids.shape, bool)
    for row, (prompt_ids, answer_ids) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt_ids) + len(answer_ids)
        ids[row, :end] = prompt_ids + answer_ids
        is_answer[row, len(prompt_ids) : end] = True
    return Examples(ids, is_answer)
