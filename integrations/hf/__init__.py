"""Hugging Face: tensor parallelism through transformers' registry, a callback, a launcher."""
