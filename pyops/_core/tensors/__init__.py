"""Tensors of torch, cupy and numpy. A file imports only files above it:

dtypes   element types
tensor   what a plan sees of a tensor
"""
