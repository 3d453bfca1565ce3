"""The ops of this library inside other projects: a module for each, imported by name and only where it is wanted."""
