"""The suite. `axes` is its vocabulary, `calls` its way to call any op, `compare` its one definition of equal."""
