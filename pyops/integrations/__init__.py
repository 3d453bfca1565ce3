"""pyops as a replacement for parts of other projects. `import pyops` does not load these modules."""
