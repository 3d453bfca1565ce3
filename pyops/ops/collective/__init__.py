"""Collectives among the GPUs of one node, and the memory that they share. Several nodes: docs/many_gpus.md."""
