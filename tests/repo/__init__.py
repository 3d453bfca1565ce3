"""Tests of the repository itself: its words and its hooks. They know no op."""
