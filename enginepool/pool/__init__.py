"""What users call: `EnginePool` and its verbs."""
