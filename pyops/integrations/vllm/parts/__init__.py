"""Parts of vLLM that are no ops of torch, and that this library takes over where the plugin is asked to."""
