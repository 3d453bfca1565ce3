"""Mutation testing: make one change in a kernel, a plan or a function, and see whether a test fails.

A *mutant* is one such change of one file. Its *operator* names the kind of change. A mutant is *killed* if a test fails
that passes without the mutant. `python -m tests.mutation --help` says how to run them. The modules, each built on those
above it:

    code        tokens of a kernel source, and its top-level declarations
    mutant      Mutant: what is changed where, under a name that survives edits elsewhere in the file
    python      where a mutant of Python stands, and how a process gets it
    operators   the mutants that can be generated from a kernel source
    semantic    mutants written by hand: each is a mistake that an engineer could make, and says its consequence
    plans       the mutants that can be generated from the functions that plan launches
    equivalent  generated mutants that are known to change no result, with the reason
    choose      the tests that could notice a mutant, the most promising first
    judge       runs these tests in a fork of the process, in which the mutant is applied
"""
