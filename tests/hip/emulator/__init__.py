"""AMD code objects on a CPU: an adapter to the instruction emulator of tinygrad's tests, and repairs of it.

`checkout` imports the emulator, `repairs` and `fp8` fix it, `code_object` loads and launches, `cases` runs every op.
"""
