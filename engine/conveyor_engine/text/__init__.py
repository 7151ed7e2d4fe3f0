"""Between text and tokens: tokenizer, chat template, detokenizer, stop strings. No torch."""
