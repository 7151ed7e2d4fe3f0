"""Models in llama.cpp's format GGUF: one file with configuration, tokenizer and weights."""
