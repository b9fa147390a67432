"""The Metal backend: plain-ops twins on MLX, and the shipped Metal text run on a CPU through `shim/`."""
