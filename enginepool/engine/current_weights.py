"""The pool's current weights, copied to engines that come back without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import jax

from enginepool.dispatch.condition import DesiredState, EngineState
from enginepool.engine.jobs import EngineStopped
from enginepool.engine.pinned_engine import PinnedEngine
from enginepool.logs import logger
from enginepool.weights.arrays import lost
from enginepool.weights.placement import place

if TYPE_CHECKING:
    from enginepool.weights.leaves import EngineLeaves

# In these states a failed engine still has its leaves. A rebuild may replace them, and first puts
# those that are current into `kept`.
_KEEPING = (EngineState.QUARANTINED, EngineState.RESETTING)

_NOWHERE = "its weights are gone, and no other engine has them; call update_weights"


class CurrentWeights:
    """Finds the weights of the pool's last update, and copies them to engines that lack them. No
    swap may begin while this is used.

    Args:
        engines: The pool's engines, in order. Empty until the pool opens.
    """

    def __init__(self, desired: DesiredState, engines: Sequence[PinnedEngine]) -> None:
        self._desired, self._engines = desired, engines

    def source_for(self, engine: PinnedEngine) -> Literal["sibling", "checkpoint", "nowhere"]:
        """Where a rebuilt engine can get the weights, if it does not have them itself."""
        if self._serving(engine):
            return "sibling"
        return "checkpoint" if self._desired.update == 0 else "nowhere"

    def are_current(self, engine: PinnedEngine) -> bool:
        """Whether the engine's weights are those of the last update. They may be lost."""
        weights = engine.condition.weights
        return weights.update == self._desired.update and not weights.being_replaced

    def bring_to(self, engine: PinnedEngine) -> None:
        """Copy the weights to an engine that lacks them, on its thread. If no other engine has
        them, the engine is left without weights, and its condition says so."""
        weights = engine.condition.weights
        if self.are_current(engine) and not engine.leaves.lost():
            return
        for theirs in self._copies(engine):
            self._copy(engine, theirs)
            return
        # The engine's leaves belong to no version. A partial update must not keep them.
        engine.leaves.drop(list(engine.leaves))
        weights.missing = _NOWHERE

    def bring_from(self, engine: PinnedEngine) -> None:
        """Copy this engine's weights, on its thread, to engines that came back without weights."""
        for other in self._engines:
            condition = other.condition
            if not condition.reachable or condition.weights.missing != _NOWHERE:
                continue

            def load(other: PinnedEngine = other) -> None:
                self._copy(other, engine.leaves)
                other.load()

            try:
                other.channel.run(load).result()
            except EngineStopped:
                continue  # it has failed
            except Exception as error:
                # It has no weights until the next update.
                condition.weights.missing = f"its weights are gone; copying them failed: {error}"
                logger().warning(
                    "enginepool.weights_not_copied", engine=other.index, why=str(error)
                )

    def _copy(self, engine: PinnedEngine, theirs: Mapping[str, jax.Array]) -> None:
        _copy_leaves(engine.leaves, theirs)
        desired = self._desired
        engine.condition.weights.record_update(desired.weight_version, desired.update)

    def _serving(self, engine: PinnedEngine) -> list[PinnedEngine]:
        """Other engines that serve with the current weights."""
        return [
            other
            for other in self._engines
            if other is not engine
            and other.condition.serving
            and other.condition.weights.update == self._desired.update
            and not other.leaves.lost()  # a trainer may have donated them since its last step
        ]

    def _copies(self, engine: PinnedEngine) -> Iterator[Mapping[str, jax.Array]]:
        """Weight sets that may be copied, best first. A recovering engine may have one."""
        for sibling in self._serving(engine):
            yield sibling.leaves
        for other in self._engines:
            condition = other.condition
            has_them = self.are_current(other) and condition.weights.missing is None
            if other is engine or not has_them:
                continue
            if not condition.recovering or condition.kv_not_finite:
                continue  # its device may be at fault, or hang
            held = _held(other)
            if held and not lost(held):
                yield held


def _held(engine: PinnedEngine) -> Mapping[str, jax.Array]:
    """The weights of a failed engine that other engines may read."""
    with suppress(LookupError):  # it is taken apart
        leaves = dict(engine.leaves)
        # In this order, because a rebuild sets `kept`, then changes the state, then has new leaves.
        if engine.condition.state in _KEEPING:
            return leaves
    return engine.kept


def _copy_leaves(mine: EngineLeaves, theirs: Mapping[str, jax.Array]) -> None:
    """Copy leaf by leaf, so that the devices never hold more than one set and one leaf."""
    for path, spec in mine.specs.items():
        mine.drop([path])
        array = place(theirs[path], spec.sharding, spec.dtype)
        array.block_until_ready()
        mine.replace({path: array})
