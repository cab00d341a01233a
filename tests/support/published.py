"""Published models by the configurations that docs/plan.md uses."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIGS = {
    name: str(ROOT / "enginepool" / "doctor" / "models" / f"Qwen3-{name}.json")
    for name in ("0.6B", "4B", "8B", "30B-A3B")
}
# From listings of the published checkpoints. A tied head counts once.
PARAMETERS = {
    "0.6B": 596_049_920,
    "4B": 4_022_468_096,
    "8B": 8_190_735_360,
    "30B-A3B": 30_532_122_624,
}
