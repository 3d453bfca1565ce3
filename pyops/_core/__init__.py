"""The runtime. A file imports only files above it:

errors config dtypes                  what is raised, which switches exist, the element types
source lazy device driver             kernel text; torch and cupy on demand; device sizes; the driver
tensor compiler host offline          what a plan sees of a tensor; text to function: on a GPU, on the CPU, for a GPU
check kernel                          checks and choices of a plan; Kernel, Specialisation, Launch
layout workspace launch declaration    parameters in memory; scratch memory; launching; what a reference says of its op
plan wrapper torch_library planner    what a call needs; the function of an op, in Python and in torch; what plans it
prepare op example                    from arguments to a plan; @op and the registry; the arguments an op is shown with
"""
