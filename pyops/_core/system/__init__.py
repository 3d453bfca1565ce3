"""What the process finds. A file imports only files above it:

folders         caches on disk that processes share
lazy            torch and cupy on demand
device driver   sizes of a device; calls of the driver that CuPy does not have
"""
