"""Benchmarks of every op and of its rivals, other libraries' kernels: ``python -m benchmarks --help``.

A file imports only files above it:

shapes timing rivals                              the measured arguments; the timing of a call; other libraries
accuracy                                          whether two sets of outputs agree
kernel_time overhead compile_time numerics        one measurement each: a row for an op at a shape
report                                            rows to tables, JSON and a plot
tune                                              search for Configs: ``python -m benchmarks tune --help``
__main__                                          the command line

Separate commands:

host (with fake_driver)                           host time of every op without a GPU: ``python -m benchmarks.host``
decode, transformers                              a whole model: ``python -m benchmarks.decode``
"""
