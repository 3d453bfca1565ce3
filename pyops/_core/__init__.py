"""The runtime. A file imports only files above it:

errors config log dtypes docstring    what is raised, which switches exist, what is logged; element types; docstrings
locks folders                         threads and processes
source lazy device driver tuning      kernel text; torch and cupy on demand; device sizes; the driver; tuned choices
tensor hiprtc compiler host offline   what a plan sees of a tensor; text to function: on a GPU, on the CPU, for a GPU
check tensor_map kernel               checks and choices of a plan; tensor maps for TMA; Kernel, Specialisation, Launch
layout workspace launch ranks         parameters in memory; scratch memory; launching; ranks as one launch on the host
declaration planner guard plan        what a reference says of its op; what plans it; what a call needs
wrapper torch_library                 the function of an op; its forms in torch
index_check arguments prepare         PYOPS_CHECK; arguments as a plan takes them; from them to a plan
returning                             the function of an op that allocates its outputs
typed op example                      what type checkers know; @op and the registry; example arguments
"""
