"""Chooses each row's next token from its logits."""
