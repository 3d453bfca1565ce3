"""The runtime. A file imports only files above it:

errors config dtypes                  what is raised, which switches exist, the element types
source lazy device driver tuning      kernel text; torch and cupy on demand; device sizes; the driver; tuned choices
tensor compiler host offline          what a plan sees of a tensor; text to function: on a GPU, on the CPU, for a GPU
check kernel                          checks and choices of a plan; Kernel, Specialisation, Launch
launch binding                        packing and launching; the wrapper written for an op, torch.library
op example                            @op and the registry; the arguments an op is shown with
"""
