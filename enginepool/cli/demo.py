"""The demonstration: engines start, answer sums side by side, and report their times."""

from __future__ import annotations

import random
import threading
import time

from rich.console import Console
from rich.table import Table

from enginepool.console.output import engine_line
from enginepool.pool.pool import EnginePool

# How many of the answers are shown.
_ROWS = 12


def run(engines: int, prompts: int) -> None:
    """Open a pool of the toy, one engine per device, and let it answer `prompts` sums."""
    console = Console(highlight=False)
    console.print(f"{engines} sglang-jax engines in this one process, warmed up one by one:")
    pool, threads = EnginePool(devices=engines), threading.active_count()
    started = time.perf_counter()
    try:
        pool.open(on_engine=lambda engine: console.print("  " + engine_line(engine)))
        compiled = pool.stats()["executables"]
        console.print(
            f"Ready after {time.perf_counter() - started:.1f} s; {compiled['compiled']} programs "
            f"compiled, {compiled['reused']} taken over from another engine.\n"
        )
        _answer_sums(console, pool, prompts)
        _chat(console, pool)
    finally:
        pool.close()
    console.print(f"Closed: {threading.active_count()} Python threads, {threads} before.")


def _answer_sums(console: Console, pool: EnginePool, count: int) -> None:
    draw = random.Random(0)
    pairs = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    started = time.perf_counter()
    results = pool.generate_all([f"{a}+{b}=" for a, b in pairs])
    wall = time.perf_counter() - started

    table = Table("prompt", "answer", "engine", title="Prompts and answers", title_justify="left")
    for (a, b), result in list(zip(pairs, results, strict=True))[:_ROWS]:
        table.add_row(f"{a}+{b}=", result["text"], str(result["meta_info"]["engine_index"]))
    if count > _ROWS:
        table.caption = f"and {count - _ROWS} more"
    console.print(table)

    right = sum(r["text"] == str(a + b) for (a, b), r in zip(pairs, results, strict=True))
    tokens = sum(result["meta_info"]["completion_tokens"] for result in results)
    console.print(f"{right} of {count} right; {tokens} tokens in {wall:.2f} s", end=": ")
    console.print(f"{tokens / wall:.0f} tokens per second.")
    shares = [0] * len(pool.engines)
    for result in results:
        shares[result["meta_info"]["engine_index"]] += 1
    busy = [engine["busy_seconds"] for engine in pool.stats()["engines"]]
    each = ", ".join(f"{n} in {s:.2f} s" for n, s in zip(shares, busy, strict=True))
    console.print(f"Prompts by engine: {each}.")
    console.print(
        f"Wall time {wall:.2f} s, with {len(busy)} engines at once. The slowest engine was busy "
        f"for {max(busy):.2f} s. The wall time is {wall / max(busy):.2f} times that.\n"
    )


def _chat(console: Console, pool: EnginePool) -> None:
    question = [{"role": "user", "content": "12+7="}]
    answer = pool.chat(question)
    assert isinstance(answer, dict)
    console.print(f"Through the chat template: 12+7= → {answer['text']}")
