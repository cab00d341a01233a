"""Making an engine on its thread, making parts of it or all of it anew, taking it apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from enginepool.engine.channel import Channel

if TYPE_CHECKING:
    from sgl_jax.srt.entrypoints.engine import Engine

    from enginepool.weights.leaves import EngineLeaves


class Assembly:
    """One engine as an object. Everything on the engine's thread.

    Attributes:
        engine: Upstream's Engine, from the moment it is built; an empty shell once it is taken
            apart, another object after `rebuild`.
        leaves: Its weights.
    """

    def __init__(
        self, server_args: dict[str, Any], devices: Sequence[jax.Device], channel: Channel
    ) -> None:
        self.engine: Engine | None = None
        self.leaves: EngineLeaves | None = None
        self.build_seconds = self.warmup_seconds = 0.0
        self._server_args = server_args
        self._devices = devices
        self._channel = channel
        self._compile_programs = False

    @property
    def scheduler(self) -> Any:
        """Upstream's scheduler, also while the engine gets no jobs; None if there is none."""
        return self.engine.scheduler_info.get("scheduler") if self.engine is not None else None

    def build(self, source: EngineLeaves | None = None) -> None:
        """Make the engine, with the weights of another one, if given, instead of reading them."""
        self._build(self._server_args, source)

    def warm_up(self, *, compile_programs: bool) -> None:
        """Compile every program, unless they are to be compiled while serving."""
        from enginepool.engine.warmup import warm_up

        self._compile_programs = compile_programs
        started = time.perf_counter()
        if compile_programs:
            warm_up(self.scheduler)
        self.warmup_seconds = time.perf_counter() - started

    def reset(self) -> None:
        """Make the scheduler's state and the KV cache anew; weights and programs stay.

        For an engine whose requests were taken over.
        """
        self.scheduler.reset()
        self._channel.attach(self.scheduler)

    def rebuild(self, *, dummy_weights: bool) -> None:
        """Make everything anew, with the checkpoint's weights or with some that do not count."""
        old: Any = self.engine
        self.take_apart()
        changed = {"load_format": "dummy"} if dummy_weights else {}
        self._build({**self._server_args, **changed})
        new: Any = self.engine
        new.tokenizer_manager, new.loop = old.tokenizer_manager, old.loop
        self.warm_up(compile_programs=self._compile_programs)

    def take_apart(self) -> None:
        if self.engine is not None:
            from enginepool.engine.build import dismantle

            dismantle(self.engine)

    def _build(self, server_args: dict[str, Any], source: EngineLeaves | None = None) -> None:
        # Not at the top: importing sgl_jax has side effects that the patches must precede.
        from enginepool.engine.build import build_engine

        started = time.perf_counter()
        self.engine = build_engine(server_args, self._devices, self._channel, source)
        self.leaves = self.scheduler.leaves
        self._channel.attach(self.scheduler)
        self.build_seconds = time.perf_counter() - started
