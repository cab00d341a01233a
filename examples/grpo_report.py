"""The output of grpo.py: a line per step on standard output and in a file, and a plot."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Log:
    """metrics.jsonl in the run's folder, lines on standard output, and W&B where asked for."""

    def __init__(self, options: argparse.Namespace, *, first: int) -> None:
        """
        Args:
            first: The step that comes next. Of an earlier run, the lines before it stay.
        """
        self._file = (options.out / "metrics.jsonl").open("a+", encoding="utf-8")
        self._file.seek(0)
        kept = [line for line in self._file if json.loads(line)["step"] < first]
        self._file.truncate(0)
        self._file.writelines(kept)
        self._wandb: Any = None
        if options.wandb:
            import wandb

            self._wandb = wandb.init(project=options.wandb, config=vars(options))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if error is None else 1)

    def write(self, metrics: dict[str, Any]) -> None:
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(metrics)
        parts = [f"step {metrics['step']:4d}"]
        if "reward" in metrics:
            ratio = metrics["ratio"]
            parts += [
                f"reward {metrics['reward']:.3f}",
                f"KL {metrics['kl_to_start']:.4f}",
                f"ratio {ratio['mean']:.5f} ({ratio['min']:.4f} to {ratio['max']:.4f})",
                f"versions {metrics['versions']}",
                " ".join(f"{k} {v:.2f} s" for k, v in metrics["seconds"].items()),
            ]
        if "held_out" in metrics:
            parts.append(f"held-out sums {metrics['held_out']:.1%}")
        print(", ".join(parts), flush=True)


def plot(folder: Path) -> None:
    """plot.png beside metrics.jsonl: reward, KL to the first weights, trainer to rollout."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if "reward" in row]
    held_out = [row for row in rows if "held_out" in row]
    at = [row["step"] for row in steps]
    figure, (rewards, drift, ratios) = pyplot.subplots(3, sharex=True, figsize=(7, 8))
    rewards.plot(at, [row["reward"] for row in steps], label="reward of samples", alpha=0.6)
    rewards.plot(
        [row["step"] for row in held_out],
        [row["held_out"] for row in held_out],
        "o-",
        label="held-out sums, greedy",
    )
    rewards.set_ylim(0, 1)
    rewards.legend(loc="lower right")
    drift.plot(at, [row["kl_to_start"] for row in steps])
    drift.set_ylabel("KL to the first weights")
    ratios.plot(at, [row["ratio"]["mean"] for row in steps], label="mean")
    ratios.fill_between(
        at,
        [row["ratio"]["min"] for row in steps],
        [row["ratio"]["max"] for row in steps],
        alpha=0.3,
        label="least to largest token",
    )
    ratios.set_ylabel("trainer / rollout")
    ratios.set_xlabel("step")
    ratios.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(folder / "plot.png", dpi=120)
    pyplot.close(figure)
