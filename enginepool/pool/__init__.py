"""The API that users call: `EnginePool` and its methods."""
