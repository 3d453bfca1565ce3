"""From kernels to launches. A file imports only files above it:

scratch tensor_map kernel   scratch memory; tensor maps for TMA; Kernel, Specialisation, Launch: what a plan returns
layout workspace launch     parameters in memory; where scratch memory lies; launches on a stream
backend                     what runs kernels on the CPU
"""
