"""Weights of 8 and 4 bits: their formats, how weights are rounded to them, and what a GGUF file has of them."""
