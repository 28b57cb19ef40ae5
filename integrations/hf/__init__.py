"""Hugging Face: tensor parallelism through transformers' registry, a Trainer callback, a launcher."""
