"""The commands of ``python -m pyops``, as functions. A module imports other packages of `pyops` and modules above it:

axes                                  the axes of an op's example, from keywords or from the command line
table show warmup                     the table of ops; one op and its source; compiling kernels ahead of time
stub                                  what editors and type checkers know of the ops
doctor demo                           what this machine can run; a transformer block checked against float64
coverage                              the ops of vLLM that this library serves
"""
