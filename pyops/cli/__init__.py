"""The commands of ``python -m pyops``, as functions. A module imports other packages of `pyops` and modules above it:

axes                                  the axes of an op's example, from keywords or from the command line
table show warmup                     all ops; one op and its source; kernels made ready ahead of their first call
stub                                  what editors and type checkers know of the ops
doctor demo                           what this machine can run; a transformer block checked against float64
coverage                              which ops of vLLM there are
"""
