"""The tasks of this engine, a package each: `registry` says what is in one."""
