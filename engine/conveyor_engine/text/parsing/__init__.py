"""What a model writes, divided into the fields of a message: text, thinking and calls of tools."""
