"""The commands of ``python -m pyops``, as functions. A module imports other packages of `pyops` and modules above it:

axes                                  the axes of an op's example, from keywords or from the command line
table show                            all ops; one op and its source
progress                              how far a command has come
doctor                                what this machine can run
generate demo                         text from a model; text from random weights, checked against PyTorch
coverage refusals                     which ops of vLLM there are; what they refuse
"""
