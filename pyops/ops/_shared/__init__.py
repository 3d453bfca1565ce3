"""What several families of ops need: launch geometry of rows, and fp8 codes of references."""
