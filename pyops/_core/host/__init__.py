"""Kernels on the CPU: the C++ toolchain, the loader of emulated kernels, and the lines of their faults."""
