"""The plot of `benchmarks/scaling.py`: throughput and efficiency against the number of engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_ALONE = {"pool of one": "pool", "one upstream Engine": "processes"}


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write a PNG: a line of panels for each workload and step time. Hollow points are limited by
    cores and prove nothing."""
    panels = sorted({(row["workload"], row["step_ms"]) for row in rows})
    figure = Figure(figsize=(9, 3 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 2, squeeze=False)
    for (workload, step_ms), (throughput, efficiency) in zip(panels, axes, strict=True):
        those = [row for row in rows if (row["workload"], row["step_ms"]) == (workload, step_ms)]
        for name in ("pool", "processes", "threads"):
            points = _points(those, name)
            for axis, key in ((throughput, "tokens_per_sec"), (efficiency, "efficiency")):
                (line,) = axis.plot(
                    [row["engines"] for row in points], [row[key] for row in points], label=name
                )
                for row in points:
                    hollow = row["limited_by_cores"]
                    axis.plot(
                        row["engines"],
                        row[key],
                        "o",
                        color=line.get_color(),
                        markerfacecolor="none" if hollow else line.get_color(),
                    )
        throughput.set(title=f"{workload}, {step_ms:g} ms steps", ylabel="tokens/s")
        efficiency.set(ylabel="efficiency", ylim=(0, 1.1))
        for axis in (throughput, efficiency):
            axis.set_xlabel("engines")
            axis.grid(alpha=0.3)
        throughput.legend()
    figure.savefig(file, dpi=120)


def _points(rows: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """One row a number of engines; one engine is the kind's own measure."""
    found = {row["engines"]: row for row in rows if row["name"] == name}
    for row in rows:
        if _ALONE.get(row["name"]) == name:
            found.setdefault(1, row)
    return [found[engines] for engines in sorted(found)]
