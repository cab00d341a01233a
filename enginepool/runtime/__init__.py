"""An open pool: opening, dispatch, pauses, recovery, figures. Knows nothing of `EnginePool`."""
