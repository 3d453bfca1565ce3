"""From a reference to an operator. A file imports only files above it:

declaration planner          what a reference says of its op; what plans it
guard plan                   whether a call is like the last one; what a call needs
wrapper torch_library        the function of an op; its forms in torch
index_check arguments        PYOPS_CHECK; arguments as a plan takes them
trust                        kernels that no GPU of an architecture has run, compared at their first use
prepare returning            from arguments to a plan; the function of an op that allocates its outputs
op typed decorator           Op and the registry; what type checkers know of an op; @op
"""
