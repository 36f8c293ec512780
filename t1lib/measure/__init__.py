"""The measuring protocol: samplers of time and memory, floors, records, environment and manifest."""
