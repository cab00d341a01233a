"""`enginepool reference hot-update`: weights changed in place, seen by a checksum."""

from __future__ import annotations

from dataclasses import dataclass

from enginepool.reference.options import RunOptions
from enginepool.reference.run import Run, started
from enginepool.reference.swap import load


@dataclass(frozen=True)
class Noise:
    """The noise that is added to the weights; see `EnginePool.perturb_weights`."""

    num_leaves: int
    seed: int
    scale: float


def run(options: RunOptions, noise: Noise, *, reload: bool) -> bool:
    """Returns whether every check held.

    Args:
        reload: Load the weights first. Otherwise the dummy weights are changed.
    """
    with started("hot-update", options) as this:
        if reload:
            _reload(this)
        _perturb(this, noise)
        results = this.generate()
        # With dummy weights the text may be empty.
        this.show(
            "generate_text", results, may_be_empty=not reload, generate_text=results[0]["text"]
        )
        return not this.printer.failed


def _reload(this: Run) -> None:
    directory, report = load(this)
    this.swapped(
        "reload",
        report,
        reload={
            "elapsed_sec": report.seconds["total"],
            "resolved_path": str(directory),
            "leaf_count": sum(this.leaf_counts()),
        },
    )


def _perturb(this: Run, noise: Noise) -> None:
    pool = this.pool
    before, print_before = pool.quick_checksum(), pool.checksum()
    this.printer.phase("checksum_before", checksum_before=before, fingerprint=print_before)
    pool.perturb_weights(noise.seed, noise.scale, noise.num_leaves)
    after, print_after = pool.quick_checksum(), pool.checksum()
    this.printer.phase(
        "perturb",
        perturb={
            "num_leaves": noise.num_leaves,
            "noise_seed": noise.seed,
            "noise_scale": noise.scale,
        },
        checksum_after=after,
        checksum_delta=after - before,
        fingerprint=print_after,
    )
    this.printer.check(after != before, "perturb: checksum_delta is 0, the weights did not change")
