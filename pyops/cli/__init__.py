"""The commands of ``python -m pyops``, as functions. A module imports other packages of `pyops` and modules above it:

axes                                  the axes of an op's example, from keywords or from the command line
table show                            the table of ops; one op and its source
stub                                  what editors and type checkers know of the ops
progress                              a progress bar and a status line
bundle                                a model's kernels, compiled into a folder without a GPU
doctor                                what this machine can run
generate demo                         text from a model; text from random weights, checked against PyTorch
coverage refusals                     the ops of vLLM that this library serves; what they refuse
"""
