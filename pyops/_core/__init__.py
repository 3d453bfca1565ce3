"""The runtime. A file imports only files above it; each folder lists its own files in order:

errors config log locks   what is raised, which switches exist, what is logged; threads and processes
system                    what the process finds: cache folders, torch and CuPy, devices and their driver
tensors                   element types; what a plan sees of a tensor
text                      from kernel text to a function
launch                    from kernels to launches on a stream
op                        from a reference to an operator
"""
