"""pyops in the place of what other projects bring themselves. `import pyops` loads none of it."""
