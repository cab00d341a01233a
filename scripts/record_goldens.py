"""Records, for tests/checkpoints/, what transformers computes from configurations.

    python scripts/record_goldens.py rotary           # needs torch and transformers 4.57
    python scripts/record_goldens.py configurations   # needs transformers 5

`rotary` writes into each case of rotary.json what transformers' own functions compute: the
frequencies, and the factor of cosines and sines. `configurations` writes into each case of
transformers5.json the config.json that transformers 5 makes of it. The cases themselves, by name
and in the fields of transformers 4, are written by hand. The tests need neither
torch nor transformers 5.
"""

import json
import sys
import tempfile
from pathlib import Path

CHECKPOINTS = Path(__file__).parents[1] / "tests" / "checkpoints"


def rotary() -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def record(case: dict) -> dict:
        config = AutoConfig.for_model(**case["config"])
        kind = (config.rope_scaling or {}).get("rope_type", "default")
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        return case | {"frequencies": frequencies.tolist(), "scale": float(scale)}

    _fill_in(CHECKPOINTS / "rotary.json", record)


def configurations() -> None:
    from transformers import AutoConfig

    def record(case: dict) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            AutoConfig.for_model(**case["config"]).save_pretrained(folder)
            written = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return case | {"written": written}

    _fill_in(CHECKPOINTS / "transformers5.json", record)


def _fill_in(file: Path, record) -> None:
    cases = json.loads(file.read_text(encoding="utf-8"))
    lines = []
    for name, case in cases.items():
        recorded = record(json.loads(json.dumps(case)))  # transformers changes what it is given
        lines.append(f"{json.dumps(name)}: {json.dumps({**recorded, 'config': case['config']})}")
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    {"rotary": rotary, "configurations": configurations}[sys.argv[1]]()
