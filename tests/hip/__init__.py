"""AMD GPUs on a machine that has none: hiprtc from Debian's packages, and every kernel through it."""
