"""Kinds that a refit sends (`control`, `plan`), and others' files that it reads (`huggingface`)."""
