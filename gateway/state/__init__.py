"""What outlives the gateway's process, below ``state.path``. Each file has one writer: the module that names it."""
