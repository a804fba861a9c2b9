"""What a first run needs and nobody has at hand: a tiny model, its tokenizer and a few conversations."""
