"""The families of ops, a package each. `pyops` exports every op under its own name; `pyops.registry` lists them."""
