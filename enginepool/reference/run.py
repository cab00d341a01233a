"""The common part of all runs: dummy engines, new weights, one generation on every engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import jax

from enginepool.devices import resolve_devices
from enginepool.errors import EnginePoolError, InvalidWeights
from enginepool.pool.pool import EnginePool
from enginepool.reference.options import RunOptions
from enginepool.reference.printer import Printer
from enginepool.reference.wandb_sink import connect

if TYPE_CHECKING:
    from enginepool.runtime.swap_report import SwapReport


class Run:
    """A pool of dummy engines, and its printed phases.

    Attributes:
        ready_bytes: The bytes in use when the dummy engines were ready.
    """

    def __init__(self, pool: EnginePool, options: RunOptions, printer: Printer) -> None:
        self.pool = pool
        self.options = options
        self.printer = printer
        self._counts = self.leaf_counts()
        self.ready_bytes = printer.phase("engine_ready_dummy", **self._engines())

    def schedulers(self) -> list[Any]:
        return [engine.scheduler_info["scheduler"] for engine in self.pool.engines]

    def leaf_counts(self) -> list[int]:
        """The number of leaves that each engine's programs get."""
        return [scheduler.leaves.count() for scheduler in self.schedulers()]

    @contextmanager
    def swapping(self) -> Iterator[None]:
        """Print a phase if weights cannot be found, read or loaded inside the block."""
        try:
            yield
        except EnginePoolError as error:
            self.printer.phase("weights_swap_error", error=str(error), hint=_hint(error))
            raise

    def swapped(self, phase: str, report: SwapReport, **fields: Any) -> None:
        """Print the phase of an update. After it engines must hold as many leaves and bytes as when
        they were ready."""
        counts = self.leaf_counts()
        engines = [
            {
                "engine_index": engine.engine_index,
                "num_model_state_leaves": counts[engine.engine_index],
                "shared": engine.shared,
                "copied": engine.copied,
                "fingerprint": engine.fingerprint,
            }
            for engine in report.engines
        ]
        after = self.printer.phase(
            phase, **fields, num_model_state_leaves=sum(counts), engines=engines
        )
        self.printer.check(
            counts == self._counts, f"{phase}: leaves of engines are {counts}, were {self._counts}"
        )
        self.printer.check_bytes(
            after, self.ready_bytes, f"{phase}: memory is not what one set of weights takes"
        )

    def generate(self) -> list[dict[str, Any]]:
        """The prompt's result on each engine."""
        prompt, params = self.options.prompt, dict(self.options.sampling_params)
        engines = self.pool.engines
        with ThreadPoolExecutor(len(engines)) as executor:
            return list(executor.map(lambda engine: engine.generate(prompt, params), engines))

    def show(
        self,
        phase: str,
        results: list[dict[str, Any]],
        *,
        may_be_empty: bool = False,
        **fields: Any,
    ) -> int:
        """Print the phase of a generation. Every engine must have answered."""
        texts = [result["text"] for result in results]
        used = self.printer.phase(
            phase,
            prompt=self.options.prompt,
            prompt_sha256=sha256(self.options.prompt),
            sampling_params=dict(self.options.sampling_params),
            text=texts[0],
            text_sha256=sha256(texts[0]),
            raw=results[0],
            engines=[
                {"engine_index": index, "text_sha256": sha256(text)}
                for index, text in enumerate(texts)
            ],
            **fields,
        )
        silent = [index for index, text in enumerate(texts) if not text]
        self.printer.check(
            may_be_empty or not silent, f"{phase}: the text of engines {silent} is empty"
        )
        return used

    def _engines(self) -> dict[str, Any]:
        from huggingface_hub.constants import HF_HUB_CACHE

        args = self.pool.engines[0].server_args
        stats = self.pool.stats()["engines"]
        return {
            "model_id": self.options.model,
            "device": stats[0]["platform"],
            "tp_size": args.tp_size,
            "dp_size": args.dp_size,
            "num_engines": len(stats),
            "dtype": str(next(iter(self.schedulers()[0].leaves.specs.values())).dtype),
            "load_format": args.load_format,
            "download_dir": args.download_dir,
            "hf_cache_dir": HF_HUB_CACHE,
            "sgl_jax_version": version("sglang-jax"),
            "num_model_state_leaves": sum(self._counts),
            "engines": [
                {
                    "engine_index": index,
                    "devices": engine["devices"],
                    "num_model_state_leaves": self._counts[index],
                }
                for index, engine in enumerate(stats)
            ],
        }


@contextmanager
def started(name: str, options: RunOptions) -> Iterator[Run]:
    """Find the devices, which starts JAX. Start W&B if it is wanted, then dummy engines. At the end
    of the block, end the engines and the run at W&B."""
    groups = resolve_devices(options.devices, options.tp_size)
    devices = [device for group in groups for device in group]
    printer = Printer(devices)
    with ExitStack() as stack:
        if options.wandb is not None:
            stack.enter_context(connect(printer, options.wandb, name, options))
        printer.phase(
            "jax_ready",
            jax=jax.__version__,
            sgl_jax_version=version("sglang-jax"),
            backend=jax.default_backend(),
            devices=[str(device) for device in jax.devices()],
            target_devices=[device.id for device in devices],
        )
        pool = EnginePool(
            options.model,
            devices=devices,
            tp_size=options.tp_size,
            warmup="none",
            **options.for_platform(devices[0].platform),
        )
        yield Run(stack.enter_context(pool), options, printer)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _hint(error: EnginePoolError) -> str:
    if isinstance(error, InvalidWeights):
        return "--weights: a directory of safetensors or a hub id, with the tensors of --model"
    return "is there room for a second set on every device?"
