"""Code shared by families of ops: launch geometry of rows, formats of weights, fp8 conversions of references."""
