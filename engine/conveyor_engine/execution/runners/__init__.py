"""One runner for each kind of forward: it executes plans on its device. Built by `build`, called by `loop`."""
