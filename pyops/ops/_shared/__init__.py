"""What several families of ops need: launch geometry of rows, and fp8 conversions of references."""
