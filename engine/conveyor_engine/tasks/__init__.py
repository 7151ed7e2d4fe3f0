"""The tasks of this engine. Each task is a package; `registry` describes its modules."""
