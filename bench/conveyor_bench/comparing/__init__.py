"""Systems that run in turns in one process, and how near this engine comes to the machine's limit."""
