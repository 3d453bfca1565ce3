"""The parts of vLLM that do not call their kernels through torch.ops, each replaced by a module with `install`."""
