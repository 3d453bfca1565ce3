"""From kernel text to a function. A file imports only files above it:

source            the text of a kernel, with its includes and constants
modules           compiled kernels on disk
hiprtc nvrtc      the compilers, for AMD GPUs and for older architectures of NVIDIA's
compiler          text to function
"""
