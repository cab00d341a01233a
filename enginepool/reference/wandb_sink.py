"""Sends phases to Weights & Biases, under the keys of the original scripts. wandb is imported only
if it is used."""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from enginepool.console.complaints import complain
from enginepool.errors import InvalidConfig
from enginepool.reference.options import RunOptions, WandbOptions
from enginepool.reference.printer import Printer

_KV_FIELDS = ("fused_bytes_total", "fused_bytes_per_layer", "deleted_buffers")
_OWN_FIELDS = (
    "num_model_state_leaves",
    "num_params",
    "checksum_before",
    "checksum_after",
    "checksum_delta",
)
_HINT = "set WANDB_API_KEY, or WANDB_MODE=offline to keep the run in ./wandb for `wandb sync`"


class WandbSink:
    """One run at W&B. It has one step per phase, and a table of the texts when it ends."""

    def __init__(self, options: WandbOptions, config: dict[str, Any]) -> None:
        import wandb

        name = options.name or f"{config['run']}_{time.strftime('%Y%m%d_%H%M%S')}"
        self._wandb = wandb
        self._run = wandb.init(project=options.project, name=name, config=config)
        self._texts: dict[str, str] = {}

    def describe(self) -> dict[str, Any]:
        run = self._run
        return {"project": run.project, "name": run.name, "url": run.url, "id": run.id}

    def log(self, index: int, record: dict[str, Any]) -> None:
        metrics = {"phase/idx": index, "phase/name": record["phase"]}
        metrics["time/elapsed_s"] = record["elapsed_s"]
        metrics |= _memory(record["memory"])
        metrics |= {name: record[name] for name in _OWN_FIELDS if name in record}
        for info in ("drop_info", "rebuild_info"):
            for name in _KV_FIELDS:
                if name in record.get(info, {}):
                    metrics[f"kv/{name}"] = record[info][name]
        if "same_output" in record:
            metrics["determinism/same_output"] = record["same_output"]
        if "text" in record:
            self._texts["prompt"] = record["prompt"]
            self._texts[f"output_{len(self._texts)}"] = record["text"]
        self._run.log(metrics, step=index)

    def close(self, *, failed: bool) -> None:
        if self._texts:
            rows: list[Any] = [
                [kind, hashlib.sha256(text.encode()).hexdigest(), len(text), text]
                for kind, text in self._texts.items()
            ]
            table = self._wandb.Table(columns=["kind", "sha256", "chars", "text"], data=rows)
            self._run.log({"sample_texts": table})
        self._run.finish(exit_code=int(failed))


@contextmanager
def connect(
    printer: Printer, wanted: WandbOptions, name: str, options: RunOptions
) -> Iterator[None]:
    """Send the printer's phases to W&B as well, until the run is over.

    If W&B cannot be reached or refuses the login, the run goes on. The phase wandb_init_error and
    standard error report it.

    Raises:
        InvalidConfig: The package is not installed.
    """
    config = {
        "run": name,
        "model_id": options.model,
        "weights": options.weights,
        "tp_size": options.tp_size,
        "load_format": "dummy",
        "sampling_params": dict(options.sampling_params),
        "server_args": dict(options.server_args),
        "prompt_chars": len(options.prompt),
    }
    if not _installed():
        message = "--wandb needs the package wandb: pip install 'enginepool[wandb]'"
        printer.phase("wandb_init_error", error="No module named 'wandb'", hint=message)
        raise InvalidConfig(message)
    sink = None
    try:
        sink = WandbSink(wanted, config)
    except Exception as error:  # whatever wandb, its network or its files raise
        printer.phase("wandb_init_error", error=str(error), hint=_HINT)
        complain(f"--wandb: {error}; the run goes on without it")
    if sink is None:
        yield
        return
    printer.sink = sink.log
    printer.phase("wandb_init", **sink.describe())
    failed = True
    try:
        yield
        failed = bool(printer.failed)
    finally:
        sink.close(failed=failed)


def _installed() -> bool:
    spec = importlib.util.find_spec("wandb")
    # A folder ./wandb, in which wandb keeps its runs, can be imported as an empty package.
    return spec is not None and spec.origin is not None


def _memory(memory: dict[str, Any]) -> dict[str, int]:
    metrics = {"mem/process/rss_bytes": memory["process_rss_bytes"]}
    for name, value in memory["jax_device_memory_summary"].items():
        metrics[f"mem/jax/{name}"] = value
    for index, stats in enumerate(memory["jax_device_memory_stats"]):
        metrics |= {f"mem/jax/device{index}/{name}": value for name, value in stats.items()}
    return metrics
