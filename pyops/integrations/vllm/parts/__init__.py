"""What of vLLM's layers runs on this library beside its ops: each part with `install` and `uninstall`."""
