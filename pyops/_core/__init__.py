"""The runtime. A file imports only files above it:

errors config log dtypes              what is raised, which switches exist, what is logged, the element types
locks folders                         threads and processes
source lazy device driver tuning      kernel text; torch and cupy on demand; device sizes; the driver; tuned choices
tensor hiprtc compiler offline        what a plan sees of a tensor; text to function, on a GPU and for a GPU
check scratch tensor_map kernel       checks of a plan; scratch memory; maps for TMA; Kernel, Specialisation, Launch
layout workspace launch backend       parameters in memory; scratch memory; launching; what runs kernels on the CPU
declaration planner guard plan        what a reference says of its op; what plans it; what a call needs
wrapper torch_library                 the function of an op; its forms in torch
index_check arguments prepare         PYOPS_CHECK; arguments as a plan takes them; from them to a plan
returning                             the function of an op that allocates its outputs
op typed decorator example            Op and the registry; what type checkers know of an op; @op; example arguments
"""
