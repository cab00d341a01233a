"""An open pool: opening, pauses, updates of weights, statistics. Does not import `EnginePool`."""
