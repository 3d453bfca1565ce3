"""The test suite. `axes` lists the parameters of each op's example, `calls` calls any op, `compare` defines
equality."""
