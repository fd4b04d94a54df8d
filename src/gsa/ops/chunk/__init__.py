"""The engine `chunk`: the chunkwise forms in torch, on any device."""
