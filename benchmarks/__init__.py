"""Times of every op in `pyops.ops` beside its rivals: ``python -m benchmarks --help``.

A file imports only files above it:

shapes timing rivals                              which arguments; how a call is timed; who else does the same
accuracy                                          whether two sets of outputs agree
kernel_time overhead compile_time numerics        one measurement each: a row for an op at a shape
report                                            rows to tables, JSON and a plot
__main__                                          the command line
decode                                            a whole model instead: ``python -m benchmarks.decode``
"""
