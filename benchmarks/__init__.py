"""Times of every op and of its rivals: ``python -m benchmarks --help``.

A file imports only files above it:

shapes timing rivals                              which arguments; how a call is timed; who else does the same
accuracy                                          whether two sets of outputs agree
kernel_time overhead compile_time numerics        one measurement each: a row for an op at a shape
report                                            rows to tables, JSON and a plot
tune                                              search for Configs: ``python -m benchmarks tune --help``
__main__                                          the command line

Commands of their own:

host (with fake_driver)                           host time of every op without a GPU: ``python -m benchmarks.host``
decode, transformers                              a whole model: ``python -m benchmarks.decode``
"""
