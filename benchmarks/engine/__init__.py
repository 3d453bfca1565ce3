"""vLLM's engine with its own kernels, with the plugin, and alone: without vLLM's compiled libraries.

A file imports only files above it:

models        the models: configurations and random weights
worker        one engine in a process of its own, which times the rows that it is asked for
report        results as tables
__main__      starts the workers, asks them in turn, saves the results
"""
