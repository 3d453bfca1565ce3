"""vLLM's engine with its own kernels, with the plugin, and alone: without vLLM's compiled libraries.

A file imports only files above it:

models        configurations of models, and random weights
worker        a process with one engine, which times rows on request
report        results as tables
__main__      starts the workers, requests rows from each in turn, saves the results
"""
