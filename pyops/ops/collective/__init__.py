"""Collectives among the GPUs of a node, and the memory that they share. Beyond a node: docs/many_gpus.md."""
