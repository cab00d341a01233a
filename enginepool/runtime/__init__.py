"""An open pool: opening, pauses, updates of weights, figures. Knows nothing of `EnginePool`."""
