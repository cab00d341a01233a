"""An open pool: opening, pauses, updates of weights, figures. Does not import `EnginePool`."""
